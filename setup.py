"""The C modules, where they can be built: without a compiler or Python's headers gapmeter is installed without them."""

import sys
import sysconfig

from setuptools import Extension, setup

MODULES = [
    Extension(
        name,
        [source],
        define_macros=[("_GNU_SOURCE", None), ("Py_LIMITED_API", "0x030B0000")],
        py_limited_api=True,
        extra_compile_args=["-O2"],
        optional=True,
    )
    for name, source in (
        ("gapmeter.analysis.ledger._intervals", "analysis/ledger/_intervals.c"),
        ("gapmeter.loadgen._receive", "loadgen/_receive.c"),
        ("gapmeter.records._events", "records/_events.c"),
    )
]
# Two rely on the interpreter's lock, and one of them on Linux.
USABLE = sys.platform == "linux" and not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(ext_modules=MODULES if USABLE else [], options={"bdist_wheel": {"py_limited_api": "cp311"}})
