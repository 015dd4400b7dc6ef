"""One model: its units, and their shared state.

[Note: root] The model belongs to the outermost wrapper, and nested wrappers' units to the model around them. Its parts
get the values that they need, and do not refer to the model; a wrapper finds that of its unit by `model_of`.

[Note: several roots] Two models may share a part, as an actor and a critic share a backbone. Only the model that was
made last drives its units. The other one runs them in its forwards and still has them in `units`, so that norms and
summaries are of all of its parameters. But its iterations must not bring them to rest: in one graph task both models
have a backward, and the first that ends may have gone through the other one's gradients.
"""

from __future__ import annotations

import weakref
from typing import Any

from ..base.events import Observers
from ..base.peers import Peers
from .backward_hooks import BackwardHooks
from .executor import Executor
from .forward_driver import ForwardDriver
from .iteration import Iteration
from .resources import ModelSettings, Resources
from .setup import Setup
from .unit import Unit, refuse_without_model
from .unit_collectives import UnitCollectives
from .unit_state import UnitPosition


class Model:
    """The state shared by all units of one model.

    Attributes:
        setup: the units that it drives, their initialization, and changes of their options.
        units: those of its modules, children before parents as wrapped, the outermost last. Another model around a part
            of them may drive that part. [Note: several roots]
        resources: values that the units share.
        iteration: the state of one forward and its backward.
        agreement: the comparisons between ranks.
        forwards, backwards: the drivers of these.
        coalescer: the groups of units that share their collectives.
        observers: the attached features. [Note: observers]
    """

    def __init__(
        self,
        unit: Unit,
        resources: Resources,
        settings: ModelSettings,
        agreement: Peers | None = None,
        coalescer: UnitCollectives | None = None,
    ) -> None:
        """`agreement`: what compares ranks; by default nothing does. [Note: peers] `coalescer`: how units share their
        collectives; by default they do not."""
        self.resources = resources
        self.observers = observers = Observers()
        self.agreement = agreement = Peers() if agreement is None else agreement
        self.coalescer = coalescer = UnitCollectives() if coalescer is None else coalescer
        self.setup = setup = Setup([unit], settings, resources, agreement, coalescer, observers)
        self.units = [unit]
        executor = Executor(coalescer, agreement)
        self.iteration = iteration = Iteration(setup.units, resources, agreement, observers, executor)
        shared: dict[str, Any] = {
            "setup": setup,
            "iteration": iteration,
            "agreement": agreement,
            "observers": observers,
            "coalescer": coalescer,
        }
        self.backwards = BackwardHooks(**shared)
        self.forwards = ForwardDriver(**shared, resources=resources, backwards=self.backwards)
        self.backwards.attach(unit)
        self._take(unit)

    @property
    def outermost(self) -> Unit:
        """The unit of the outermost wrapper."""
        return self.setup.outermost

    def _take(self, unit: Unit) -> None:
        unit.model = weakref.ref(self)
        unit.resources = self.resources
        position = unit.position
        unit.position = UnitPosition(position.name, position.index, position.first_parameter, unit is self.outermost)
        for handle, _, grads in unit.kinds:
            handle.move_to_tracker(self.resources.tracker)
            if grads.carried is not None:
                grads.carried.move_to_tracker(self.resources.tracker)

    def adopt(self, nested: list[Unit]) -> None:
        """Take the units of wrapped descendants into this model, in front of the outermost one. Precondition: none of
        their gradients is pending."""
        models = {unit: model_of(unit) for unit in nested}  # these models may keep other units
        for units in (self.units, self.setup.units):
            units[:] = [*nested, self.outermost]  # in place: parts of the model have this list
        self.setup.version += 1
        for each in dict.fromkeys(models.values()):
            each.release(nested)
            self.agreement.loaded |= each.agreement.loaded
        for unit, each in models.items():
            self.backwards.adopt(unit, each.backwards)
            self._take(unit)

    def release(self, taken: list[Unit]) -> None:
        """Another model drives the units `taken` from now on. [Note: several roots]"""
        if self.outermost not in taken:
            self.setup.units[:] = [unit for unit in self.setup.units if unit not in taken]
            self.setup.version += 1


def model_of(unit: Unit) -> Model:
    """The model that `unit` belongs to.

    Raises:
        UsageError: it has been deleted.
    """
    model: Model | None = unit.model()
    if model is None:
        refuse_without_model(unit)
    return model
