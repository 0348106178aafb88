"""The sections of a report that engines are needed for. These are its types; the modules named fill them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .as_json import OPTIONAL
from .figures.measure import Estimate

if TYPE_CHECKING:
    from ..verify.operation_outputs import OpDifference
    from .operations.operation_errors import OwnError


@dataclass(frozen=True)
class EngineSection:
    """The engines and the machine (audit.py)."""

    weight_version: int
    torch: str
    device: str
    engine_settings: dict[str, dict[str, str]]  # sampler (unless it is a log), trainer, machine
    settings_fingerprint: str  # SHA-256, 64 hexadecimal digits


@dataclass(frozen=True)
class Jump:
    """The first operation that does something else than the checkpoint says (operations/locate.py)."""

    op: str
    relative: float
    sound: float
    factor: float
    cut_off: bool
    engine: str
    dtype: str
    explanation: str  # what it computes instead; empty where nothing fits
    absent: str  # the operation before that only the engine or only the checkpoint has; else empty
    both_engines: bool
    others: int
    other_kinds: list[str]
    other_operations: list[str]
    between_checkpoints: bool = False


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor of two checkpoints differs: in its shape, or in some elements."""

    name: str
    shapes: list[list[int]] | None = field(default=None, metadata=OPTIONAL)
    elements: int = 0
    unequal: int = 0
    relative: float = 0.0


@dataclass(frozen=True)
class CheckpointsDifference:
    """The differences of two checkpoints (operations/other_checkpoint.py)."""

    config: dict[str, list]  # of the fields that differ, both values
    tensors: int
    tensors_unequal: int
    unequal: list[TensorDifference]
    only_first: list[str]
    only_second: list[str]

    @property
    def any(self) -> bool:
        """Whether they differ at all."""
        return bool(self.config or self.tensors_unequal or self.only_first or self.only_second)


@dataclass(frozen=True)
class ExpertsDifference:
    """Where two sides choose other experts (operations/experts.py)."""

    places: int  # pairs of a token and a layer with experts
    differ: int  # of them, those with other experts
    first_layer: int | None  # the first layer where they differ; None where none does
    first_token: int | None  # the first token in it that has other experts, by its place in the sequence
    sequence: int | None = None  # of a log: the completion in which they are the first


@dataclass(frozen=True)
class TraceSection:
    """One sequence through both engines, operation by operation (operations/locate.py)."""

    operations: "list[OpDifference]"
    first_divergence: "OpDifference | None"
    one_sided: dict[str, list[str]]  # operations that the sampler alone has, and the trainer alone
    other_shapes: list[str]
    jump: Jump | None
    remedy: str  # of the operation of the jump, or else of the first that differs; empty where none does
    # by engine; None where no checkpoint judged them
    own_errors: "dict[str, list[OwnError]] | None" = field(default=None, metadata=OPTIONAL)
    # where the two engines have two
    checkpoints: CheckpointsDifference | None = field(default=None, metadata=OPTIONAL)
    # of a mixture of experts whose routers both engines show
    experts: ExpertsDifference | None = field(default=None, metadata=OPTIONAL)
    traced_outside: bool = False  # whether the sampler's traced forward ran outside of its process


@dataclass(frozen=True)
class CacheSection:
    """What a sampler that differs draws without its caches (audit.py)."""

    frac_equal_without_caches: float
    stale_cache: bool


@dataclass(frozen=True)
class WayFigures:
    """The same tokens, scored in two ways by one engine (figures/batch_invariance.py)."""

    tokens: int
    unequal: int
    max_abs: float


@dataclass(frozen=True)
class Place:
    """A token of a request. Positions count from 0."""

    request: int
    position: int


@dataclass(frozen=True)
class RequestsFigures:
    """Requests drawn in one way, compared with the same requests drawn alone."""

    way: str
    at_once: int
    compared: int
    unequal: int
    first: Place | None  # the first place that differs
    max_abs: float  # before the tokens part


@dataclass(frozen=True)
class BatchInvariance:
    """A sampler compared with itself, alone and beside others (figures/batch_invariance.py)."""

    requests: int
    rows: list[RequestsFigures]
    unequal_from: int | None  # the lowest number of requests at once at which a bit differs


@dataclass(frozen=True)
class FullVocab:
    """The log-probabilities of the whole vocabulary at each place (figures/full_vocab.py)."""

    places: int
    vocabulary: int
    frac_places_equal: float
    frac_values_equal: float
    kl_sampler_trainer: Estimate
    kl_trainer_sampler: Estimate
    mass_sampler: float
    mass_trainer: float
    infinite_kl: int
    other_kept_set: int
    total_variation: float
    total_variation_max: float
    same_first: float
    same_top: float
    top: int
    rank_sampler: float
    rank_trainer: float
    same_rank: float
    rank_change_max: int
    max_abs: float
    sequence: int | None
    position: int | None
    token: int | None
