"""The setup of a model: its units are named, connected and compared with those of other ranks before their first
collective; and later changes of their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UsageError
from ..base.events import Observers
from ..base.peers import Checksums, Peers
from ..comm.axes import ProcessGroups
from .module_tree import entries
from .resources import ModelSettings, Resources
from .unit import Unit
from .unit_collectives import UnitCollectives
from .unit_state import Resolved, Transports, UnitPosition
from .user_writes import free_stale


@dataclass(eq=False)
class Setup:
    """The units of one model, and the state of their setup.

    Attributes:
        units: children before parents as wrapped, the outermost last.
        entries: the units whose forward users call: the outermost one, or those inside it where it has no forward.
        ready: whether units are named and connected, and ranks have compared them.
        placed: whether the devices of all tensors were verified after the last `.to()`.
        version: of the options; caches of values that depend on them compare it.
        words_of_choices: the cached `description`; None after a change.
        checksums: returns those of the initial values of units, if they are to be compared; attached from outside.
        introduce: compares the units with those of other ranks, before the first collective; attached from outside.
    """

    units: list[Unit]
    settings: ModelSettings
    resources: Resources
    agreement: Peers
    coalescer: UnitCollectives
    observers: Observers
    entries: frozenset[Unit] = frozenset()
    ready: bool = False
    placed: bool = False
    version: int = 0
    checksums: Callable[[], Checksums] = list
    introduce: Callable[..., None] | None = None
    words_of_choices: str | None = None

    @property
    def outermost(self) -> Unit:
        """The unit of the outermost wrapper."""
        return self.units[-1]

    # -- before the first collective ---------------------------------------------------------------------------------

    def lazy_init(self, *, training: bool = False) -> None:
        """At the first forward: name and connect the units, and agree with the other ranks. Collective over all
        groups. `training`: compare initial values, too."""
        if self.ready:
            return
        units, outermost = self.units, self.outermost
        if outermost.entries.are_several:
            raise UsageError(
                f"the modules {outermost.entries.class_name} were given to fully_shard() as a list, and no module "
                "around them was. Shard the model that holds them, too, and call that first"
            )
        self.entries = entries(outermost)
        names = {module: name for name, module in outermost.entries.first.named_modules()}
        parameters = 0
        for index, unit in enumerate(units):
            name = unit.entries.name(lambda module: names.get(module, ""))
            unit.position = UnitPosition(name, index, parameters, unit is outermost)
            for handle in unit.handles:
                handle.name = name
                parameters += len(handle.leaves)
            self.connect(unit)
        for observe in self.observers.setup_begins:
            observe(units)
        # Tensors that were loaded instead of parameters, on the meta device or not.
        self.take_over([unit for unit in units if unit.entries.in_place])
        self.check_placed()
        self.choose_unshard_stream()
        if training:
            self.take_over(units)  # a tensor that a user assigned instead of a parameter is no initial value
        self.agreement.is_alone = all([groups.world == 1 for unit in units for groups in unit.axes.all])
        if self.introduce is not None:
            self.introduce(self, training=training)
        self.ready = True

    def check_placed(self) -> None:
        """Tensors may have moved since: let observers refuse those that are not where they compute, and measure."""
        for observe in self.observers.placed:
            observe(self.units, self.resources.device.device)
        self.coalescer.measure(self.units)
        self.placed = True

    def connect(self, unit: Unit) -> None:
        """Give `unit` its transports."""
        unit.axes.connect({id(groups): self._transports(unit, groups) for groups in unit.axes.all})
        self._resolve(unit)

    def _resolve(self, unit: Unit) -> None:
        """Set the values that follow from the options of `unit`, which is connected."""
        precision, chosen = unit.built.mixed_precision, unit.options.schedule
        casts = precision.cast_root_forward_inputs if unit in self.entries else precision.cast_forward_inputs
        reshards = chosen.reshard_after_forward
        if reshards is None:  # the outermost unit's backward begins where its forward ends: freeing would gain nothing
            reshards = unit.built.traits.reshard_after_forward and not unit.position.is_outermost
        reducers, whole = {}, []
        for handle in unit.handles:
            transports = unit.axes.transports_of(handle) if unit.axes.elsewhere else unit.axes.own_transports
            scatter, across = transports.reducers
            if chosen.all_reduce or across is None:
                whole.append(handle)
            reducers[handle] = scatter, across if chosen.all_reduce else None
        unit.resolved = Resolved(precision.param_dtype if casts else None, bool(reshards), reducers, frozenset(whole))

    def _transports(self, unit: Unit, groups: ProcessGroups) -> Transports:
        """The transports of `unit` over `groups`. [Note: communication hooks]"""
        hook, transport = unit.options.comm_hook, self.resources.transport
        gather = transport(groups.shard if hook is None else groups.scatter, "gather")
        scatter = transport(groups.scatter, "scatter")
        replicate = transport(groups.replicate, "replicate") if groups.replicate is not None else None
        parameters, gradients = self.resources.exchanges.in_few_bits(unit.built.mixed_precision)
        encoded = self.resources.encoded
        across = encoded(replicate, gradients) if replicate is not None else None
        reducers, averaged = (encoded(scatter, gradients), across), groups.world
        if hook is not None:
            reducers, averaged = hook.reducers(hook, groups, scatter, replicate)
        return Transports(gather, scatter, replicate, reducers, encoded(gather, parameters), averaged)

    def choose_unshard_stream(self) -> None:
        """Issue gathers on the caller's stream, or on one of their own, according to the options.

        Raises:
            UsageError: the options differ between parts of the model.
        """
        outermost = self.outermost
        on_callers = outermost.options.schedule.unshard_async_op
        for unit in self.units:
            if unit.options.schedule.unshard_async_op is not on_callers:
                raise UsageError(
                    f"unit {unit.label}: set_unshard_async_op() was called on a {unit.entries.class_name} that an "
                    f"outer {outermost.entries.class_name} was wrapped around later. Gathers of a model share one "
                    "order: call it on the outermost wrapper, once all exist"
                )
        self.resources.gather_on_callers_stream(on_callers)

    def take_over(self, units: Sequence[Unit]) -> None:
        """Let observers take over what users assigned to parameters of `units`, which are of this model, and free kept
        parameters that are out of date."""
        for observe in self.observers.takes_over:
            observe(units)
        free_stale(units)

    # -- choices -----------------------------------------------------------------------------------------------------

    def set_options(self, unit: Unit, **changes: Any) -> None:
        """Change options of `unit`; ranks compare them at the next forward or backward."""
        unit.options = replace(unit.options, **changes)
        if self.ready:
            self._resolve(unit)
        self.options_changed()

    def options_changed(self) -> None:
        """Invalidate values that depend on options, and notify observers of a change."""
        self.version += 1
        self.words_of_choices = None
        for observe in self.observers.options_changed:
            observe()
        self.coalescer.forget()

    def set_schedule(self, unit: Unit, **changes: Any) -> None:
        """Change the schedule options of `unit`. [Note: schedule]"""
        self.set_options(unit, schedule=replace(unit.options.schedule, **changes))

    @property
    def description(self) -> str:
        """The changed options, in words that are equal on all ranks; "" if there are none."""
        if self.words_of_choices is None:
            found: dict[str, list[str]] = {}
            for unit in self.units:
                for words in unit.options.describe():
                    found.setdefault(words, []).append(unit.label)
            everywhere = len(self.units)
            reported = [
                f"{words} in {'all units' if len(labels) == everywhere else ', '.join(labels)}"
                for words, labels in sorted(found.items())
            ]
            reported += [each.description for each in self.observers.all if each.description]
            self.words_of_choices = "; ".join(reported)
        return self.words_of_choices
