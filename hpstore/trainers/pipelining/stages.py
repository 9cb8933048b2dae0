"""Stages that tell when they compute, and one module of all that a rank holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from hpstore.errors import ConfigError
from hpstore.trainers.pipelining.events import NO_MICROBATCH, EventRecorder
from hpstore.trainers.pipelining.joint_optimizers import Optimizers
from hpstore.trainers.pipelining.step_agreement import NONE, Votes
from hpstore.trainers.pipelining.tied_tensors import Mark, Tied

S = TypeVar("S", bound=PipelineStage)
RESERVED = (
    "model",
    "optimizer",
    "loader",
    "pipeline",
    "scheduler",
    "scaler",
)  # in a pipeline's state
MEANT = {
    "lr_scheduler": "scheduler",
    "schedulers": "scheduler",
    "lr_schedulers": "scheduler",
    "grad_scaler": "scaler",
    "gradscaler": "scaler",
    "optim": "optimizer",
    "tie": "tied",
    "ckpt_step": "step",
}


# Any below: torch's own signatures, which differ from version to version and are passed on
def watched(kind: type[S], recorder: EventRecorder) -> type[S]:
    """A subclass of a stage class whose compute calls are noted. It computes what `kind` does.

    Only methods that every schedule calls are overridden: forward_one_chunk, backward_one_chunk,
    backward_weight_one_chunk, perform_reduce_grad.
    """

    class Watched(kind):  # type: ignore[misc, valid-type]
        hpstore_recorder = recorder

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
            began = recorder.begin()
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **options)
            finally:
                recorder.end(self.stage_index, "F", fwd_chunk_id, began)

        def backward_one_chunk(
            self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **options: Any
        ) -> Any:
            began = recorder.begin()
            try:
                return super().backward_one_chunk(
                    bwd_chunk_id, loss=loss, full_backward=full_backward, **options
                )
            finally:
                recorder.end(self.stage_index, "B" if full_backward else "I", bwd_chunk_id, began)

        def backward_weight_one_chunk(self, bwd_chunk_id: int, **options: Any) -> Any:
            began = recorder.begin()
            try:
                return super().backward_weight_one_chunk(bwd_chunk_id, **options)
            finally:
                recorder.end(self.stage_index, "W", bwd_chunk_id, began)

        def perform_reduce_grad(self, *args: Any, **options: Any) -> Any:
            began = recorder.begin()
            try:
                return super().perform_reduce_grad(*args, **options)
            finally:
                recorder.end(self.stage_index, "R", NO_MICROBATCH, began)

    Watched.__name__ = Watched.__qualname__ = f"Watched{kind.__name__}"
    return Watched


def watch(stage: Any, recorder: EventRecorder) -> Any:
    """Let a stage that is built already note when it computes; the same stage."""
    if getattr(stage, "hpstore_recorder", None) is not recorder:
        stage.__class__ = watched(type(stage), recorder)
    return stage


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The module in DDP and torch.compile's wrapper, whose names are those of the model."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else None
        inner = getattr(module, "_orig_mod", inner)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def merged(modules: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """One module with the names of all: it holds the very parameters and layers of the stages.

    One stage is itself. Of several, a layer that one of them alone has, or that they share, is
    taken whole; where two have a container of the same name (ModuleDicts of layers), their children
    are put side by side, with the extra state of the one that has some. Raises ConfigError where
    two have different tensors, or an extra state, under one name, and for a container that saves
    or loads in a way of its own.
    """
    if len(modules) == 1:
        return modules[0]
    return _grafted([bare(module) for module in modules], "")


class _Container(torch.nn.Module):
    """What stages have under one name, side by side, where one of them has an extra state."""

    def __init__(self, of: torch.nn.Module) -> None:
        super().__init__()
        self._get, self._set = of.get_extra_state, of.set_extra_state  # of no child: its tensors
        # are here already

    def get_extra_state(self) -> Any:
        return self._get()

    def set_extra_state(self, state: Any) -> None:
        self._set(state)


def _has_extra(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _own_ways(module: torch.nn.Module) -> bool:
    """Whether a container saves or loads otherwise than its tensors one by one."""
    kind, plain = type(module), torch.nn.Module
    hooks = (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    return (
        kind._save_to_state_dict is not plain._save_to_state_dict
        or kind._load_from_state_dict is not plain._load_from_state_dict
        or any(getattr(module, name, None) for name in hooks)
    )


def _container_of(modules: Sequence[torch.nn.Module], path: str) -> torch.nn.Module:
    """An empty one that saves and loads as these do."""
    where = path.rstrip(".") or type(modules[0]).__name__
    if any(map(_own_ways, modules)):
        raise ConfigError(
            f"two stages of this rank have {where!r}, which saves or loads its state in a way of "
            "its own (hooks, _save_to_state_dict): put what does so into a layer that one stage "
            "alone has. Nothing was changed."
        )
    extra = [module for module in modules if _has_extra(module)]
    if len(extra) > 1:
        raise ConfigError(twice(f"{path}_extra_state"))
    return _Container(extra[0]) if extra else torch.nn.Module()


def _grafted(modules: Sequence[torch.nn.Module], path: str) -> torch.nn.Module:
    whole = _container_of(modules, path)
    children: dict[str, dict[torch.nn.Module, None]] = {}  # by name, those that differ, in order
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            _require_same(whole._parameters.get(name), parameter, f"{path}{name}")
            whole.register_parameter(name, parameter)
        for name, tensor in module.named_buffers(recurse=False):
            _require_same(whole._buffers.get(name), tensor, f"{path}{name}")
            kept = name not in module._non_persistent_buffers_set
            whole.register_buffer(name, tensor, persistent=kept)
        for name, child in module.named_children():
            children.setdefault(name, {})[child] = None
    for name, found in children.items():
        child, *others = found
        if others:
            child = _grafted([child, *others], f"{path}{name}.")
        whole.add_module(name, child)
    return whole


def _require_same(held: torch.Tensor | None, tensor: torch.Tensor, name: str) -> None:
    if held is not None and held is not tensor:
        raise ConfigError(twice(name))


def twice(name: str) -> str:
    """What to say when two stages call different tensors alike."""
    return (
        f"two stages have a tensor called {name!r}: only one of them would be saved. Keep the "
        "names of the whole model: delete layers from a ModuleDict instead of renumbering a "
        "ModuleList. Tensors that stages share on purpose are one tensor where a rank holds both, "
        "and go into tied=(...) where two ranks do. Nothing was changed."
    )


def require_own_stages(
    built: Sequence[PipelineStage],
    recorder: EventRecorder,
    stages: tuple[int, ...],
    num_stages: int,
) -> None:
    """Raise ConfigError for stages that were not wrapped, or are not those that were told."""
    if any(getattr(stage, "hpstore_recorder", None) is not recorder for stage in built):
        raise ConfigError(
            "this stage does not tell when it computes: build it with "
            "hooks.wrap_stage(PipelineStage)(...), or hand it to hooks.watch(stage)"
        )
    held = tuple(sorted(stage.stage_index for stage in built))
    counts = {stage.num_stages for stage in built}
    if held != stages or counts != {num_stages}:
        raise ConfigError(
            f"the stages {held} of {sorted(counts)} were built, PipelineHooks was told "
            f"{stages} of {num_stages}"
        )


def require_own_parameters(model: torch.nn.Module, optimizers: Optimizers) -> None:
    """Raise ConfigError for optimizers of parameters that are not in these stages, or of one."""
    mine = {id(parameter) for parameter in model.parameters()}
    theirs = [id(p) for p in optimizers.parameters()]
    if len(set(theirs)) < len(theirs):
        raise ConfigError(
            "two optimizers have the same parameter: its state would be saved twice under one "
            "name. Nothing was changed."
        )
    if not mine.issuperset(theirs):
        raise ConfigError(
            "the optimizer has parameters that are not in this rank's stages: its state would "
            "be saved without names, and those of two stages would be mixed up"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStages:
    """What a rank tells of its stages. `split`: other ranks hold parts of their tensors; `fault`:
    why they cannot be used; `votes`: that it needs in each step; `optimizers`: their kinds, where
    there are several."""

    stages: tuple[int, ...]
    names: tuple[str, ...]
    split: bool = False
    fault: str = ""
    votes: Votes = NONE
    optimizers: tuple[str, ...] = ()
    tied: Mapping[str, Mark] = field(default_factory=dict)  # of its tied tensors

    def to_json(self) -> bytes:
        """For another rank."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, text: bytes) -> HeldStages:
        """Inverse of to_json()."""
        raw = json.loads(text)
        return cls(
            stages=tuple(raw["stages"]),
            names=tuple(raw["names"]),
            split=raw["split"],
            fault=raw["fault"],
            votes=Votes(**raw["votes"]),
            optimizers=tuple(raw["optimizers"]),
            tied={name: (one, digest) for name, (one, digest) in raw["tied"].items()},
        )


def require_own_names(held: Sequence[HeldStages], tied: Tied) -> None:
    """Raise ConfigError when a rank's stages cannot be used, or when ranks with different stages
    have one name for two tensors. Pure; alike on all ranks.

    `held`: by rank. Ranks with the same stages are replicas of each other.
    """
    for rank, one in enumerate(held):
        if one.fault:
            raise ConfigError(one.fault if len(held) == 1 else f"rank {rank}: {one.fault}")
    kinds = {one.optimizers for one in held}
    if len(kinds) > 1:
        raise ConfigError(
            f"the ranks have different optimizers, {sorted(kinds)}: those of all stages must be "
            "of the same classes, in one order, as their states are saved by their numbers. Where "
            'a stage has nothing for one of them, give it [{"params": []}]. Nothing was changed.'
        )
    shared = set(tied.names)
    owner: dict[str, tuple[int, ...]] = {}
    for one in held:
        for name in one.names:
            first = owner.setdefault(name, one.stages)
            if first != one.stages and name not in shared:
                raise ConfigError(twice(name))


def counted_elsewhere(
    members: Sequence[int], rank: int, held: Sequence[HeldStages], tied: Tied
) -> frozenset[str]:
    """Tied tensors of this rank that an earlier rank of its pipeline holds, too: in a sum over the
    pipeline that one has them. Pure. `held`: by rank; `members`: in the order of their stages."""
    earlier = {name for m in members[: members.index(rank)] for name in held[m].names}
    return frozenset(
        name
        for name in tied.names
        if name in held[rank].names and not earlier.isdisjoint(tied.group_of(name))
    )


def require_free_names(more: Iterable[str], data_name: str) -> None:
    """Raise ConfigError for further values of restore() under names that mean something else."""
    own = [name for name in RESERVED if name != "loader"] + [data_name]
    if data_name in RESERVED and data_name != "loader":
        raise ConfigError(f"data_name={data_name!r} is the name of something else")
    for name in more:
        if name in MEANT:
            raise ConfigError(
                f"restore({name}=) would only save it and step nothing: say {MEANT[name]}=, or "
                "give it another name. Nothing was changed."
            )
        if name in own:
            raise ConfigError(
                f"restore({name}=): a pipeline's state has {', '.join(own)} for itself; give "
                "it another name. Nothing was changed."
            )


class Buffers:
    """The buffers of stages before torch tries their shapes out.

    With the first micro-batch torch runs each stage once on memory that holds anything, to learn
    the shapes: running statistics of norms would keep what came of it.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        with torch.no_grad():
            self._kept = [(b, b.detach().clone()) for m in modules for b in m.buffers()]
        self.changed = 0  # buffers that were put back

    def put_back(self) -> None:
        """Undo what the trial run has changed."""
        with torch.no_grad():
            for buffer, before in self._kept:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
                    self.changed += 1
        self._kept = []
