"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nn.optim.optimizer import Optimizer


class Adam(Optimizer):
    """Adam: steps of the mean gradient over its root mean square. Arguments as torch.optim.Adam.

    Kingma & Ba 2015, arXiv:1412.6980. weight_decay is added to the gradient here; AdamW takes it off the weights.
    """

    states = ("m", "v")
    path, entry = "optim/adam.wgsl", "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        )

    def check(self, options: Mapping[str, Any]) -> None:
        for name, low in (("lr", 0.0), ("eps", 0.0), ("weight_decay", 0.0)):
            if not options[name] >= low:
                raise ValueError(f"{type(self).__name__}: {name} is {options[name]}; expected {low} or more")
        if not all(0.0 <= beta < 1.0 for beta in options["betas"]):
            raise ValueError(f"{type(self).__name__}: betas are {options['betas']}; expected two numbers in [0, 1)")

    def numbers(self, options: Mapping[str, Any], step: int) -> tuple[float, ...]:
        first, second = options["betas"]
        sign = -1.0 if options["maximize"] else 1.0
        corrections = (1 - first**step, 1 - second**step)
        return (options["lr"], first, second, options["eps"], options["weight_decay"], *corrections, sign)

    def constants(self) -> dict[str, Any]:
        return {"COUPLED": 1}


class AdamW(Adam):
    """Adam with weight decay decoupled from the gradient. Arguments as torch.optim.AdamW.

    Loshchilov & Hutter 2019, arXiv:1711.05101.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)

    def constants(self) -> dict[str, Any]:
        return {"COUPLED": 0}
