"""Put in front of PYTHONPATH, lets vLLM's CPU build run Triton's kernels in Triton's own interpreter.

vLLM's CPU build takes Triton into use only where it has a backend named "cpu", which the released
wheels lack. With TRITON_INTERPRET=1 no backend compiles anything, so a name is all it takes. vLLM
looks a model's class up in a process of its own: hence here, where every process of it comes by.
"""

import types

import triton
import triton.backends
import triton.language
import triton.runtime

assert triton.language is not None
assert triton.runtime is not None


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)
