"""What all optimizers share: groups of parameters, their options, and when the host writes numbers that change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from nn.graph.scopes import current_trace
from nn.layers.module import Parameter
from nn.optim.flat import Flat, UpdateRow
from nn.tape import no_grad
from nn.tensor import Tensor, realize


class Optimizer:
    """Base of optimizers. Names and groups as in torch.optim.

    Parameters are moved into one buffer a group (in parts where a device binds less), so make the optimizer before
    anything is jitted that reads them. Within a jitted function step() becomes part of the recording; the learning rate
    and the step count are written by the host before each replay, so schedules work there too.

    Subclasses give `states` (rows of the parameters' shape), `path` and `entry` of a kernel, and `numbers`.
    """

    states: ClassVar[tuple[str, ...]] = ()
    path: ClassVar[str] = ""
    entry: ClassVar[str] = ""

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any]) -> None:
        given = list(params)
        if not given:
            raise ValueError(f"{type(self).__name__}: got no parameters; pass model.parameters(), or a list of groups")
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        self.defaults = dict(defaults)
        self.param_groups: list[dict[str, Any]] = []
        self.steps = 0
        self._flats: list[list[Flat]] = []
        seen: set[int] = set()
        for group in groups:
            self._add_group(group, seen)

    def _add_group(self, group: Mapping[str, Any], seen: set[int]) -> None:
        name = type(self).__name__
        unknown = set(group) - set(self.defaults) - {"params"}
        if unknown:
            raise ValueError(f"{name}: a group has {sorted(unknown)}; its options are {sorted(self.defaults)}")
        parameters = list(group["params"])
        for parameter in parameters:
            if not isinstance(parameter, Tensor) or not parameter.is_leaf or not parameter.requires_grad:
                raise TypeError(f"{name}: got {parameter!r}; expected parameters (leaf tensors that need a gradient)")
            if parameter.dtype != "f32":
                raise TypeError(
                    f"{name}: a parameter is {parameter.dtype} {list(parameter.shape)}; optimizers keep f32 weights; "
                    "for 16-bit arithmetic put the forward pass under autocast"
                )
            if id(parameter) in seen:
                raise ValueError(f"{name}: a parameter {list(parameter.shape)} is in two groups, or twice in one")
            seen.add(id(parameter))
        options = {**self.defaults, **group, "params": parameters}
        self.check(options)
        self.param_groups.append(options)
        self._flats.append([
            Flat(part[0].device, part, self.states, len(self.numbers(options, 1))) for part in parts(parameters)
        ])  # fmt: skip

    # --- for subclasses ----------------------------------------------------------------------------------------------

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for options out of range."""

    def numbers(self, options: Mapping[str, Any], step: int) -> Sequence[float]:
        """The kernel's struct Hyper for step 1, 2, ..."""
        raise NotImplementedError

    def constants(self) -> Mapping[str, Any]:
        """Pipeline constants of the kernel."""
        return {}

    # --- steps -------------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients (set_to_none: as torch; False sets zeros)."""
        for parameter in self.parameters():
            parameter.grad = None if set_to_none or parameter.grad is None else parameter.grad * 0

    def step(self, *, factor: Tensor | None = None) -> None:
        """Update every parameter that has a .grad, in place.

        factor: a tensor of one f32 that gradients are multiplied with (clipping, loss scales); where it is not finite,
        nothing changes.
        """
        trace = current_trace()
        with no_grad():
            changed: list[Tensor] = []
            for flats in self._flats:
                for flat in flats:
                    gradient, runs = flat.gradient()
                    if runs:
                        kernel = UpdateRow(
                            self.path, self.entry, self.states, len(flat.parameters), tuple(runs),
                            tuple(sorted(self.constants().items())),
                        )  # fmt: skip
                        flat.update(kernel, gradient, flat.one if factor is None else factor)
                        changed += [flat.weights, *flat.states.values(), *flat.parameters]
            if trace is not None:
                trace.before.append(self.advance)
            elif changed:
                self.advance()
                realize(*changed)

    def advance(self) -> None:
        """Count a step, and write the numbers that it depends on."""
        self.steps += 1
        for group, flats in zip(self.param_groups, self._flats):
            for flat in flats:
                flat.hyper.array().buffer.write(np.asarray(self.numbers(group, self.steps), np.float32))

    def state_dict(self) -> dict[str, Any]:
        """Steps, options of every group, and each parameter's states as NumPy arrays, by its number in order."""
        state: dict[int, dict[str, np.ndarray]] = {}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        for flats in self._flats:
            for flat in flats:
                for i in range(len(flat.parameters)):
                    state[len(state)] = {name: flat.part(name, i) for name in self.states}
        return {"steps": self.steps, "param_groups": groups, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict of the same optimizer over parameters of the same shapes.

        Raises: ValueError where groups, states or shapes differ; then nothing has changed.
        """
        flats = [flat for flats in self._flats for flat in flats]
        shapes = [p.shape for flat in flats for p in flat.parameters]
        given, name = state["state"], type(self).__name__
        groups = state["param_groups"]
        if len(groups) != len(self.param_groups) or any(set(g) != set(self.defaults) for g in groups):
            raise ValueError(f"{name}: the state has other groups or options; expected those of a {name} like this one")
        found = [tuple(np.shape(given.get(i, {}).get(s, 0))) for i in range(len(shapes)) for s in self.states]
        wanted = [shape for shape in shapes for _ in self.states]
        if len(given) != len(shapes) or found != wanted:
            raise ValueError(
                f"{name}: the state is of {len(given)} parameters, the optimizer has {len(shapes)}, or their shapes "
                "differ; load it into an optimizer over the same model"
            )
        for group, options in zip(self.param_groups, groups):
            group.update(options)
        self.steps, number = int(state["steps"]), 0
        for flat in flats:
            count = len(flat.parameters)
            for s in self.states:
                flat.load(s, {i: given[number + i][s] for i in range(count)})
            number += count

    def parameters(self) -> Iterator[Parameter]:
        """Of all groups, in order."""
        for group in self.param_groups:
            yield from group["params"]


def parts(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Runs of parameters that one binding can hold."""
    run: list[Parameter] = []
    size = 0
    for parameter in parameters:
        more = 4 * (parameter.numel() + 64)
        if run and size + more > parameter.device.caps.max_binding:
            yield run
            run, size = [], 0
        run.append(parameter)
        size += more
    if run:
        yield run
