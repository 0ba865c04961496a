"""The C module, where it can be built: without a compiler or Python's headers the probe is installed without it."""

import sys
import sysconfig

from setuptools import Extension, setup

STABLE = sys.version_info >= (3, 12)  # vector calls are in the limited API since: one file serves every later Python
NATIVE = Extension(
    "gapmeter_probe._native",
    ["gapmeter_probe/_native.c"],
    define_macros=[("Py_LIMITED_API", "0x030C0000")] if STABLE else [],
    py_limited_api=STABLE,
    extra_compile_args=["-O2"],
    optional=True,
)
# It relies on the interpreter's lock, and on Linux.
USABLE = sys.platform == "linux" and not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(ext_modules=[NATIVE] if USABLE else [])
