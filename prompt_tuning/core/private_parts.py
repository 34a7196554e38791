"""Private parts of other packages that we use, because no public way exists.

A release may change them without notice. A test checks that they exist, and that the
package uses no others.
"""

import pkgutil
from typing import Any

PRIVATE_PARTS = {
    # The options of a parser, for their completion, defaults and nearest names.
    "argparse.ArgumentParser._actions": "Python 3.11",
    # All values as files and bindings set them: gin tells one by its name.
    "gin.config._CONFIG": "gin-config 0.5.0",
    # The values in use, of which gin tells the text.
    "gin.config._OPERATIVE_CONFIG": "gin-config 0.5.0",
    # The imports of a config, which are kept while another config is read.
    "gin.config._IMPORTS": "gin-config 0.5.0",
    # The key-value store of JAX's processes.
    "jax._src.distributed.global_state": "JAX 0.10.2",
    # Backward passes with the sums of all sources, not of one.
    "jax._src.cudnn.fused_attention_stablehlo": "JAX 0.10.2 to 0.12.0",
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
    "._splash_attention_bwd": "JAX 0.10.2",
}
"""The version with which each part was checked."""


def private_part(name: str) -> Any:
    """Returns one of the private parts, e.g. `gin.config._CONFIG`.

    Raises:
      KeyError: if it is not listed.
    """
    if name not in PRIVATE_PARTS:
        raise KeyError(name)
    return pkgutil.resolve_name(name)


def options_of(parser: Any) -> list[Any]:
    """Returns the options of an `argparse.ArgumentParser`, in order."""
    # `argparse.ArgumentParser._actions`, which each parser has for itself.
    return parser._actions
