"""Optimizer states by parameter name, whatever wraps the model. No step is ever made for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from hpstore.checkpoint.state.fill_objects import check_names
from hpstore.checkpoint.state.lbfgs_history import in_own_order, placed, require_history
from hpstore.checkpoint.state.state_tree import join
from hpstore.errors import CheckpointError, CheckpointMismatch

# components of a parameter's name that a wrapper puts there, not its owner
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
FIRST_NAMES = "_hpstore_first_names"
"""Attribute of a module that is a part of a model: for tensors that the whole model has by several
names, from the one that the part knows to the one that the model's optimizer has it by."""
Parameters = Mapping[torch.Tensor, str]
# Any below: optimizer states hold what their optimizer puts there


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module in a DataParallel, whose names torch would not clean."""
    return model.module if isinstance(model, DataParallel) else model


def named_parameters(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Parameters with the names that get_model_state_dict gives them, or that FIRST_NAMES has."""
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise CheckpointError(
            "a model in FullyShardedDataParallel (FSDP1) cannot be saved by the Checkpointer. "
            "Nothing was changed. Write fully_shard(model) in the place of "
            "FullyShardedDataParallel(model), or keep that and "
            "dcp.save(get_model_state_dict(model), storage_writer=StorageWriter(pool, path))"
        )
    first: Mapping[str, str] = getattr(model, FIRST_NAMES, {})
    model = unwrapped(model)
    named = ((p, clean_name(model, name)) for name, p in model.named_parameters())
    return {p: first.get(name, name) for p, name in named}


def clean_name(model: torch.nn.Module, name: str) -> str:
    """A parameter's or module's name without the components that wrappers add."""
    here: Any = model
    kept = []
    for part in name.split("."):
        if part not in _WRAPPERS and not (
            part == "module" and isinstance(here, DistributedDataParallel)
        ):
            kept.append(part)
        here = getattr(here, part)
    return ".".join(kept)


def numbered(optimizer: Optimizer) -> dict[torch.Tensor, int]:
    """Parameters by the number that state_dict() gives them."""
    everyone = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    return {parameter: number for number, parameter in enumerate(everyone)}


def local_part(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has this rank's state: torch's ZeroRedundancyOptimizer holds one for the
    parameters that it gave to this rank, any other is itself.

    Each rank so saves and takes the moments of its parameters by their names, without a
    consolidate_state_dict(), and another number of ranks finds them.
    """
    if not any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        raise CheckpointError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state that can be saved; "
            "leave it out, or save without it. Nothing was changed."
        )
    return inner


def _require_names(optimizer: Optimizer, names: Parameters | None, path: str) -> None:
    if names is None and local_part(optimizer) is not optimizer:
        raise CheckpointError(
            f"state {path!r} is a {type(optimizer).__name__}, whose parts are saved by the names "
            "of their parameters: put its model into the state, too. Nothing was changed."
        )


def owns_its_format(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps its state in another form than state_dict() gives it, so that only
    its own load_state_dict() may touch it: TransformerEngine's FusedAdam, 8-bit ones and others."""
    kind = type(optimizer)
    own = ("state_dict", "load_state_dict", "_process_value_according_to_param_policy")
    hooks = ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks")
    return any(getattr(optimizer, name, None) for name in hooks) or any(
        name in vars(optimizer) or getattr(kind, name) is not getattr(Optimizer, name)
        for name in own
    )


def _numbered(optimizer: Optimizer, packed: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(number in the packed state, parameter), in order."""
    for saved, group in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(saved["params"], group["params"], strict=True)


def _is_torchs(packed: Any) -> bool:
    """Whether a state has the form that torch's optimizers give theirs."""
    return isinstance(packed, Mapping) and "param_groups" in packed and "state" in packed


def saved_optimizer(optimizer: Optimizer, names: Parameters | None, path: str) -> dict[str, Any]:
    """Its state_dict(), with names for numbers when the model is known."""
    _require_names(optimizer, names, path)
    optimizer = local_part(optimizer)
    packed = optimizer.state_dict()
    if names is None or not _is_torchs(packed):
        return packed
    called = {number: names[parameter] for number, parameter in _numbered(optimizer, packed)}
    groups = [
        {**group, "params": [called[number] for number in group["params"]]}
        for group in packed["param_groups"]
    ]
    state = {called.get(number, number): slots for number, slots in packed["state"].items()}
    return {**packed, "state": state, "param_groups": groups}


def optimizer_tensors(
    optimizer: Optimizer, names: Parameters, path: str
) -> dict[str, torch.Tensor]:
    """Moments that are there already and can be read into, by path."""
    optimizer = local_part(optimizer)
    if owns_its_format(optimizer):
        return {}
    return {
        join(path, f"state/{names[parameter]}/{slot}"): value
        for parameter, slots in optimizer.state.items()
        if parameter in names
        for slot, value in slots.items()
        if isinstance(value, torch.Tensor)
    }


def check_optimizer(
    path: str, optimizer: Optimizer, names: Parameters | None, loaded: Any, *, strict: bool
) -> None:
    """Raise CheckpointMismatch when a recorded state is not that of these parameters."""
    if not _is_torchs(loaded):
        if isinstance(loaded, Mapping) and owns_its_format(optimizer):
            return  # its own load_state_dict() knows
        raise CheckpointMismatch(f"{path!r}: what was saved is not the state of an optimizer")
    _require_names(optimizer, names, path)
    recorded: set[Any] = _recorded(loaded)  # Any: numbers, where there were no names
    if strict and names is not None and recorded and all(type(n) is int for n in recorded):
        raise CheckpointMismatch(
            f"optimizer {path!r} was saved without its model, or as its state_dict(): its "
            "parameters have numbers for names. Nothing was changed. Give its load_state_dict() "
            f"what ckpt.read(step).tree() has at {path!r}, and save it beside its model from now on"
        )
    require_history(path, optimizer, loaded)
    if names is None:
        _require_groups(path, optimizer, loaded)
        return
    optimizer = local_part(optimizer)
    mine = {names[p]: None for group in optimizer.param_groups for p in group["params"]}
    try:
        check_names(mine, dict.fromkeys(_recorded(loaded)), path, strict=strict)
        _matched(path, optimizer, names, loaded["param_groups"], strict=strict)
    except (KeyError, TypeError) as error:
        raise CheckpointMismatch(f"optimizer {path!r}: {error}. Nothing was changed.") from error


def _require_groups(path: str, optimizer: Optimizer, loaded: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch where parameters with numbers for names are not as many as saved."""
    mine, saved = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, loaded["param_groups"])
    )
    if mine != saved and not owns_its_format(optimizer):
        raise CheckpointMismatch(
            f"optimizer {path!r} was saved with groups of {saved} parameters, and has {mine}: as "
            "they have numbers for names, both must be alike. Nothing was changed. Give its model "
            "to save() and restore(), too, and moments go by name"
        )


def _recorded(loaded: Mapping[str, Any]) -> set[str]:
    """Names of the parameters whose optimizer was saved."""
    return {name for group in loaded["param_groups"] for name in group["params"]}


def _unrecorded(
    loaded: Mapping[str, Any], numbers: Mapping[str, int], packed: Mapping[str, Any]
) -> dict[str, Any]:
    """By name the moments of parameters that were not saved, or not chosen: these keep them."""
    recorded, own = _recorded(loaded), packed["state"]
    return {n: own[at] for n, at in numbers.items() if n not in recorded and at in own}


def _with_own(optimizer: Optimizer, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded state by numbers, with the moments that parameters have already where None stands
    for their number, and the options of a group of such alone."""
    recorded = loaded["param_groups"]
    if not any(number is None for group in recorded for number in group["params"]):
        return dict(loaded)
    packed = optimizer.state_dict()
    state, groups = dict(loaded["state"]), []
    for saved, mine in zip(recorded, packed["param_groups"], strict=True):
        params: list[object] = []
        for number, own in zip(saved["params"], mine["params"], strict=True):
            key = number if number is not None else ("own", own)  # no recorded number
            if number is None and own in packed["state"]:
                state[key] = packed["state"][own]
            params.append(key)
        stays = all(number is None for number in saved["params"])
        groups.append({**(mine if stays else saved), "params": params})
    return {**loaded, "state": state, "param_groups": groups}


def load_optimizer(
    path: str, optimizer: Optimizer, names: Parameters | None, loaded: Any, *, strict: bool
) -> None:
    """Give an optimizer a recorded state. Its own load_state_dict() does it, hooks included.

    A moment that torch's own load_state_dict() would cast to its parameter's dtype keeps the dtype
    it was saved with. What an optimizer's own one makes is not touched. Raises CheckpointMismatch.
    """
    whole, optimizer = optimizer, local_part(optimizer)
    try:
        if not _is_torchs(loaded):
            optimizer.load_state_dict(loaded)
            return
        if names is None:
            loaded = _with_own(optimizer, loaded)
            called = {p: number for number, p in _numbered(optimizer, loaded)}
            _load(optimizer, loaded, called, loaded["state"])
            return
        loaded = in_own_order(optimizer, names, loaded)
        packed = optimizer.state_dict()
        numbers = {names[p]: number for number, p in _numbered(optimizer, packed)}
        by_name, others = loaded["state"], _recorded(loaded) - numbers.keys()
        # what belongs to no parameter is handed on as it is
        state = {
            numbers.get(key, key): slots for key, slots in by_name.items() if key not in others
        }
        stay = _unrecorded(loaded, numbers, packed)
        state |= {numbers[name]: slots for name, slots in stay.items()}
        matched = _matched(path, optimizer, names, loaded["param_groups"], strict=strict)
        groups = [
            {**mine, **saved, "params": mine["params"]}
            for mine, saved in zip(packed["param_groups"], matched, strict=True)
        ]
        saved_slots = {**by_name, **stay}
        _load(optimizer, {**loaded, "state": state, "param_groups": groups}, names, saved_slots)
        if whole is not optimizer:
            for outer, inner in zip(whole.param_groups, optimizer.param_groups, strict=True):
                outer.update({key: value for key, value in inner.items() if key != "params"})
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointMismatch(f"optimizer {path!r}: {error}") from error


def _load(
    optimizer: Optimizer,
    packed: dict[str, Any],
    called: Mapping[torch.Tensor, Any],
    saved: Mapping[Any, Any],
) -> None:
    """load_state_dict(); where that is torch's own, dtypes are kept before any other post-hook."""
    if owns_its_format(optimizer):
        optimizer.load_state_dict(packed)
        return
    packed = dict(placed(optimizer, packed))
    hook = optimizer.register_load_state_dict_post_hook(
        lambda loaded: _keep_dtypes(loaded, called, saved), prepend=True
    )
    try:
        optimizer.load_state_dict(packed)
    finally:
        hook.remove()


def _matched(
    path: str,
    optimizer: Optimizer,
    names: Parameters,
    recorded: list[Mapping[str, Any]],
    *,
    strict: bool,
) -> list[Mapping[str, Any]]:
    """The recorded options of each parameter group, found by its parameters' names; {} for none.

    Groups without parameters, which have no names, are taken in their order.
    """
    found: list[Mapping[str, Any]] = []
    empty = iter([saved for saved in recorded if not saved["params"]])
    for group in optimizer.param_groups:
        wanted = {names[p] for p in group["params"]}
        if not wanted:
            found.append(next(empty, {}))
            continue
        matching = [saved for saved in recorded if wanted & set(saved["params"])]
        if len(matching) > 1 or (strict and not matching):
            raise CheckpointMismatch(
                f"optimizer {path!r}: the parameters of one group, among them {min(wanted)!r}, "
                f"were saved in {len(matching)} groups; build the optimizer with the groups of the "
                "save. Nothing was changed."
            )
        found.append(matching[0] if matching else {})
    return found


def _keep_dtypes(
    optimizer: Optimizer, names: Mapping[torch.Tensor, Any], by_name: Mapping[Any, Any]
) -> None:
    for parameter, slots in optimizer.state.items():
        if isinstance(parameter, torch.Tensor):
            _as_saved(slots, by_name.get(names.get(parameter), {}))


def _as_saved(mine: Any, saved: Any) -> Any:
    """A loaded value with the recorded dtypes; dicts are changed in place."""
    if isinstance(mine, torch.Tensor) and isinstance(saved, torch.Tensor):
        return mine if mine.dtype == saved.dtype else saved.to(mine.device)
    if isinstance(mine, dict) and isinstance(saved, Mapping):
        for key in mine.keys() & saved.keys():
            mine[key] = _as_saved(mine[key], saved[key])
    elif type(mine) in (list, tuple) and type(saved) is type(mine) and len(saved) == len(mine):
        return type(mine)(map(_as_saved, mine, saved))
    return mine
