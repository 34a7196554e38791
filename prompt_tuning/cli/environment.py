"""Explain errors caused by the machine, e.g. a full disk."""

import errno
import os

from prompt_tuning.core.errors import DISK_FULL, shortened, shown

EXHAUSTED = DISK_FULL | {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EPIPE}
"""System errors that other input would not avoid."""
PLATFORM_VARIABLES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")


def describe(problem: OSError) -> str:
    """Describes an error of the operating system, with the file concerned."""
    if problem.filename is None or problem.strerror is None:
        return shortened(str(problem))
    return f"{shortened(str(problem.filename))}: {problem.strerror}"


def explain_jax(problem: Exception) -> tuple[str, int] | None:
    """Explains an error of JAX that the machine causes.

    Returns:
      a message and the command's exit code; None for any other error.
    """
    if "RESOURCE_EXHAUSTED" in str(problem):
        return f"the memory does not suffice: {shortened(str(problem))}", 1
    import jax

    try:
        jax.devices()
    # JAX raises either, depending on the platform.
    except (RuntimeError, AssertionError):
        return _explain_platform(), 2
    return None


def _explain_platform() -> str:
    """Names the variable that selects devices, and the available devices."""
    import jax

    wanted = {n: os.environ[n] for n in PLATFORM_VARIABLES if os.environ.get(n)}
    settings = " and ".join(f"{name} is {shown(x)}" for name, x in wanted.items())
    jax.config.update("jax_platforms", None)
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as problem:
        return f"JAX finds no device: {shortened(str(problem))}"
    platforms = sorted({device.platform for device in devices})
    return (
        f"{settings or 'the chosen platform is missing'}, and there is no such device; "
        f"this machine has {len(devices)} of {' and '.join(platforms)}: unset "
        f"{' and '.join(wanted) or 'it'}, or set it to {platforms[0]}"
    )
