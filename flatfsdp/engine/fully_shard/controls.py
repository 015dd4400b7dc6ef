"""Methods of FSDP2's modules that the wrapper does not have: settings without effect, refused ones, and other
names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from ...api import check_bool, check_number
from ...errors import ConfigValueError, UsageError, refuse_type, warn
from ..facade.gradients_api import GradientControls
from ..facade.schedule_api import ScheduleControls
from ..models.rest import check_outermost, check_outside, quiesce
from ..runtime.unit import Unit


class FSDP2Controls(GradientControls, ScheduleControls):
    """The methods of a module of `fully_shard`. The mixin expects `_unit`."""

    def reset_iter_state(self) -> None:
        """Return to the state between iterations after a forward or a backward has failed; its gradients are dropped.

        The next forward does so automatically. Only on the outermost module.

        Raises:
            UsageError: on a nested module, or inside a forward or a backward.
        """
        call = "reset_iter_state()"
        check_outside(self._unit, call)
        model = check_outermost(self._unit, call)
        if model.setup.ready:
            quiesce(model.units, collective=False, frees=True)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`.

        Args:
            factor: as there.
        """
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Has no effect: ranks may use different parameters. One that no rank uses keeps its `.grad`; FSDP2 sets zeros.

        Args:
            reduce_scatter_unused_params, recurse: checked for their type.

        Raises:
            ConfigTypeError: an argument is not a bool.
        """
        method = "set_reduce_scatter_unused_params"
        check_bool(f"{method}: reduce_scatter_unused_params", reduce_scatter_unused_params)
        check_bool(f"{method}: recurse", recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Has no effect: a reduction overlaps with the next unit's backward, and ends before the next one is issued.

        Args:
            max_input_buffers, recurse: checked.

        Raises:
            ConfigTypeError, ConfigValueError: not a number of at least 1.
        """
        name = "set_reduce_scatter_max_input_buffers: max_input_buffers"
        check_number(name, max_input_buffers, "a number of at least 1", 1)
        check_bool("set_reduce_scatter_max_input_buffers: recurse", recurse)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reductions always have a communicator of their own, so that they overlap with gathers.

        Args:
            enable: without effect; False warns.
            recurse: checked for its type.

        Raises:
            ConfigTypeError: an argument is not a bool.
        """
        method = "set_separate_reduce_scatter_group"
        check_bool(f"{method}: enable", enable)
        check_bool(f"{method}: recurse", recurse)
        if not enable:
            warn(f"{method}: False has no effect: reductions always have a separate communicator")

    def set_post_optim_event(self, event: Any) -> None:
        """Order later operations on this stream, and so the next gathers, after `event`, which an optimizer's step on
        another stream has recorded.

        Args:
            event: a `torch.Event`. None: later operations follow those of this stream, as they do without this call.

        Raises:
            ConfigTypeError: neither an event nor None.
            UsageError: inside a forward or a backward, or on a nested module.
        """
        call = "set_post_optim_event"
        if event is not None and not callable(getattr(event, "wait", None)):
            refuse_type(f"{call}: event", event, "a torch.Event that was recorded, or None")
        check_outside(self._unit, call)
        if check_outermost(self._unit, f"{call}()").resources.device.has_streams and event is not None:
            event.wait()

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Refused: gathers run in place, between shards and the memory that modules compute with.

        Args:
            comm: ignored.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"set_custom_all_gather() of unit {self._unit.label}: gathers run in place, between shards and the memory "
            "that modules compute with, so there is no buffer for a custom gather to allocate. Leave it out; "
            "share_host_memory() and MixedPrecision(gather_dtype=...) of FullyShardedDataParallel make gathers cheaper"
        )

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Refused: reductions run in place on gradients. `set_all_reduce_hook` changes the sum.

        Args:
            comm: ignored.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"set_custom_reduce_scatter() of unit {self._unit.label}: reductions run in place on gradients, so there "
            "is no buffer for a custom reduction to allocate. Leave it out, or change the sum with "
            "set_all_reduce_hook()"
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused with True: collectives read and write parameters and gradients themselves.

        Args:
            enable: False is accepted.

        Raises:
            ConfigTypeError: not a bool.
            ConfigValueError: True.
        """
        method = "set_allocate_memory_from_process_group_for_comm"
        check_bool(f"{method}: enable", enable)
        if enable:
            raise ConfigValueError(
                f"{method}: got True, but there are no staging buffers whose memory a process group could allocate: "
                "collectives read and write parameters and gradients in place. Accepted: False"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Refused: collectives read and write parameters and gradients themselves.

        Args:
            backend: ignored.

        Raises:
            ConfigValueError: always.
        """
        raise ConfigValueError(
            f"set_symm_mem_for_comm: got {backend!r}, but there are no staging buffers to allocate in symmetric "
            "memory: collectives read and write parameters and gradients in place. Leave it out"
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """FSDP2's name of `set_unshard_async_op`."""
        self.set_unshard_async_op(async_op)

    def _get_fsdp_state(self) -> NoReturn:
        """Refused: torch's private state."""
        raise UsageError(
            f"_get_fsdp_state() of unit {self._unit.label}: this is the private state of torch's FSDP2, which modules "
            "of flatfsdp do not have. Use flatfsdp.summary(model) and flatfsdp.stats(model)"
        )


def share_streams(modules: Any, front: type) -> None:
    """Let the models of these outermost modules issue collectives on the streams of the first."""
    call = "share_comm_ctx"
    accepted = "a list of outermost modules of fully_shard()"
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        refuse_type(f"{call}: modules", modules, accepted)
    models = []
    for module in modules:
        if not isinstance(module, front):
            refuse_type(f"{call}: modules", module, accepted)
        unit: Unit = module.__dict__["_unit"]
        check_outside(unit, call)
        models.append(check_outermost(unit, f"{call}()"))
    for model in models[1:]:
        quiesce(model.units, collective=False, frees=True)
        model.resources.share_streams(models[0].resources)
