"""Hyper-parameters of PyTorch's optimizers, which `load_state_dict` replaces by those of the checkpoint."""

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


def hyper_parameters(optimizer: "Any") -> "list[dict[str, Any]]":
    """Those of each parameter group, such as `lr`: a copy."""
    return [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def set_hyper_parameters(optimizer: "Any", given: "list[dict[str, Any]]") -> None:
    """Set what `hyper_parameters` has returned before a checkpoint was loaded."""
    for group, own in zip(optimizer.param_groups, given):
        group.update(own)
