"""Gradient descent with momentum, and Lion, which takes the sign of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nn.optim.optimizer import Optimizer


class SGD(Optimizer):
    """Gradient descent, with momentum (Sutskever et al. 2013, ICML). Arguments as torch.optim.SGD."""

    path = "optim/sgd.wgsl"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(
                f"SGD: nesterov needs momentum > 0 and no dampening; got momentum {momentum}, dampening {dampening}"
            )
        self.nesterov = nesterov
        self.states = ("v",) if momentum else ()  # pyright: ignore[reportAttributeAccessIssue]
        self.entry = "sgd_momentum" if momentum else "sgd"  # pyright: ignore[reportAttributeAccessIssue]
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize})

    def check(self, options: Mapping[str, Any]) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            if not options[name] >= 0.0:
                raise ValueError(f"SGD: {name} is {options[name]}; expected 0 or more")
        if bool(options["momentum"]) != bool(self.states):
            raise ValueError("SGD: momentum is 0 in one group and not in another; make two optimizers")

    def numbers(self, options: Mapping[str, Any], step: int) -> tuple[float, ...]:
        kept = 1.0 if step == 1 else 1.0 - options["dampening"]
        sign = -1.0 if options["maximize"] else 1.0
        return (options["lr"], options["momentum"], kept, options["weight_decay"], sign)

    def constants(self) -> dict[str, Any]:
        return {"NESTEROV": int(self.nesterov)} if self.states else {}


class Lion(Optimizer):
    """Steps of one size in the direction of the sign of a mixed momentum. Chen et al. 2023, arXiv:2302.06675."""

    states = ("m",)
    path, entry = "optim/lion.wgsl", "lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def check(self, options: Mapping[str, Any]) -> None:
        if not options["lr"] >= 0.0 or not options["weight_decay"] >= 0.0:
            raise ValueError(f"Lion: lr {options['lr']}, weight_decay {options['weight_decay']}; expected 0 or more")
        if not all(0.0 <= beta < 1.0 for beta in options["betas"]):
            raise ValueError(f"Lion: betas are {options['betas']}; expected two numbers in [0, 1)")

    def numbers(self, options: Mapping[str, Any], step: int) -> tuple[float, ...]:
        return (options["lr"], *options["betas"], options["weight_decay"])
