"""Shape of the device mesh."""

import dataclasses
import math

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import DeviceCount, PositiveInteger
from prompt_tuning.settings.axis_rules import DATA, MESH_AXES, STAGE, AxisRules


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Number of devices along each axis of the mesh; -1 takes all that remain.

    Pass it to `tune` as `mesh`. Start with `MeshShape()`, which splits the rows of a
    batch over all devices. Use `fsdp` when the weights do not fit one device, `tensor`
    when a block is too slow, and `stage` when devices are far apart. Results do not
    depend on the mesh, up to rounding.

    Attributes:
      stage: pipeline stages, each with a share of the model's blocks and with devices
        along the other axes; never -1.
      data: devices that split the rows of a batch; every group along the other axes
        holds all parameters.
      fsdp: devices that split rows and parameters; parameters are gathered one block at
        a time.
      tensor: devices that split heads, feed-forward columns and the vocabulary.
      rules: mesh axes of each parameter dimension; None for Megatron's layout.

    Raises:
      InputError: if a number is neither -1 nor at least 1, or two are -1.

    Examples:
      >>> pt.MeshShape(data=2, fsdp=4).build().sizes
      {'data': 2, 'fsdp': 4, 'tensor': 1}
    """

    stage: PositiveInteger = 1
    data: DeviceCount = -1
    fsdp: DeviceCount = 1
    tensor: DeviceCount = 1
    rules: AxisRules | None = None

    def __post_init__(self):
        check_fields(self)
        free = [name for name, count in self.sizes.items() if count == -1]
        if len(free) > 1:
            raise InputError(
                f"MeshShape has -1 for {' and '.join(free)}; set all but one of them "
                "to a number of devices"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Number of devices by axis, in mesh order.

        Stages are the outermost axis because they exchange the least; a single stage is
        not an axis.
        """
        names = MESH_AXES if self.stage == 1 else (STAGE, *MESH_AXES)
        return {name: getattr(self, name) for name in names}

    @property
    def keeps_weights_whole(self) -> bool:
        """Whether the mesh splits only rows, so each device has all weights."""
        whole = all(n == 1 for axis, n in self.sizes.items() if axis != DATA)
        return whole and self.rules is None

    @property
    def without_stages(self) -> "MeshShape":
        """The same devices in one stage; stages become parts of `fsdp`."""
        fsdp = self.fsdp if self.fsdp == -1 else self.fsdp * self.stage
        return dataclasses.replace(self, stage=1, fsdp=fsdp)

    def within_stage(self, devices: int) -> "MeshShape":
        """Mesh of a single stage."""
        fixed = math.prod(count for count in self.sizes.values() if count != -1)
        sizes = {
            name: devices // fixed if count == -1 else count
            for name, count in self.sizes.items()
            if name in MESH_AXES
        }
        return dataclasses.replace(self, stage=1, **sizes)
