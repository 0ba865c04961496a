"""The C module, where it can be built: without a compiler or Python's headers gapmeter is installed without it."""

import sys
import sysconfig

from setuptools import Extension, setup

RECEIVE = Extension(
    "gapmeter.loadgen._receive",
    ["loadgen/_receive.c"],
    define_macros=[("_GNU_SOURCE", None), ("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    extra_compile_args=["-O2"],
    optional=True,
)
# It relies on the interpreter's lock, and on Linux.
USABLE = sys.platform == "linux" and not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(ext_modules=[RECEIVE] if USABLE else [], options={"bdist_wheel": {"py_limited_api": "cp311"}})
