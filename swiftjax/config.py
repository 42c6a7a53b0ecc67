"""How the engine runs a model: frozen configuration, checked where it is made.

`EngineConfig` is what users write; what it leaves open is filled in by `sizing.py`, never written
back. What the model is stands in `model_config.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from swiftjax.errors import InvalidRequestError
from swiftjax.model_config import DTYPES, Dtype
from swiftjax.quantization import Quantization

# Who starts first among those that wait, and who gives up its pages: `engine/policies.py`.
QueuePolicyName = Literal["fcfs", "priority", "shortest-first", "short-before-long", "fair"]
# A name, or a function of one's own: key(request, state), the smallest goes first.
QueuePolicyChoice = QueuePolicyName | Callable[..., Any]
QUEUE_POLICY_NAMES: tuple[QueuePolicyName, ...] = get_args(QueuePolicyName)
# dummy: random weights in the shape of a known model or of a directory's config.json
LoadFormat = Literal["auto", "dummy"]
LOAD_FORMATS: tuple[LoadFormat, ...] = get_args(LoadFormat)
# int8, fp8: a scale for every token and KV head; auto: as the model computes
KVCacheDtype = Literal["auto", "int8", "fp8"]
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = get_args(KVCacheDtype)
# cudnn: a prompt that fills the largest step alone, none of it cached, is attended over by cuDNN
PromptAttention = Literal["paged", "cudnn"]
PROMPT_ATTENTIONS: tuple[PromptAttention, ...] = get_args(PromptAttention)
VictimPolicyName = Literal["newest", "least-important"]
VICTIM_POLICY_NAMES: tuple[VictimPolicyName, ...] = get_args(VictimPolicyName)

MAX_WAIT_MS = 60_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the queue, and who goes first."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_queue_len: int = 1024
    policy: QueuePolicyChoice = "fcfs"
    victim_policy: VictimPolicyName = "newest"
    prefix_cache: bool = True
    min_batch_size: int = 1  # newcomers start once so many wait,
    max_wait: float = 0.0  # or once the oldest has waited so many seconds
    group_prompts: bool = False  # newcomers and decodes wait for prompts that fill steps
    step_sizes: tuple[int, ...] = ()  # numbers of tokens that steps are padded to, ascending


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderLimits:
    """How far a reader may fall behind. Raises InvalidRequestError for a value out of range.

    A request is paused while more than `max_unread_tokens` of it, all choices together, were not
    read, and aborted when nothing was read for `max_paused_seconds` of that (infinity: never).
    """

    max_unread_tokens: int = 1024
    max_paused_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.max_unread_tokens < 1 or not self.max_paused_seconds > 0:
            raise InvalidRequestError(
                f"max_unread_tokens is {self.max_unread_tokens} and max_paused_seconds "
                f"{self.max_paused_seconds:g}; both must be positive"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """What idle sessions may keep. Raises InvalidRequestError for a value out of range.

    Their pages stay on the device while they are at most `device_share` of all pages and nobody
    else needs the room, then in `host_gib` of host memory, then in `disk_gib` of files in `folder`
    (none without one). A session whose pages had to go is computed again from its text. Of a
    server, at most `max_open` are open; to open another, one that was idle for `idle_seconds` is
    closed. Their texts together have at most `max_tokens`, of about 40 bytes each. Of both numbers
    one owner, who is an API key, may have `owner_share`, and of the `saved_gib` that saved ones may
    take.
    """

    device_share: float = 0.5
    host_gib: float = 4.0
    disk_gib: float = 16.0
    folder: str | None = None
    max_open: int = 256
    idle_seconds: float = 3600.0
    max_tokens: int = 2**25
    owner_share: float = 0.5
    saved_gib: float = 64.0

    def __post_init__(self) -> None:
        for name in ("device_share", "owner_share"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise InvalidRequestError(f"{name} of sessions is {value!r}; it must lie in [0, 1]")
        for name in ("host_gib", "disk_gib", "idle_seconds", "saved_gib"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < float("inf"):
                raise InvalidRequestError(f"{name} of sessions is {value!r}; it must be 0 or more")
        for name in ("max_open", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidRequestError(
                    f"{name} of sessions is {value!r}; it must be a positive integer"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How to build an engine. `None` leaves the choice to the device and the checkpoint.

    `swap_space_gib` bounds the host memory that preempted sequences may take; 0 means that they are
    always computed again. Newcomers are held back until `min_batch_size` of them wait or one has
    waited for `max_wait_ms`; by default they are not. With `group_prompts` newcomers and decodes
    wait for prompts that fill whole steps: all answers together are done sooner, single ones stand
    still meanwhile. `trace` is a file to record what the scheduler decides. `overlap` dispatches a
    step before the last one is read (None: on a GPU). `deterministic` has every answer equal bit
    for bit whatever runs beside it, by kernels that give that in the place of `mosaic`, or else by
    all steps in one program.
    `streaming` compiles what requests with sinks and a window need (docs/streaming.md); with a
    `streaming_window` requests that name none get it, and `streaming_sink`. Raises
    InvalidRequestError for a value outside its range.
    """

    model_path: str
    dtype: Dtype | None = None
    max_model_len: int | None = None
    max_batch_size: int | None = None
    max_total_token_num: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    gpu_memory_utilization: float = 0.9
    implementation: str | None = None
    chat_template: str | None = None
    max_queue_len: int = 1024
    policy: QueuePolicyChoice = "fcfs"
    victim_policy: VictimPolicyName | None = None
    min_batch_size: int = 1
    max_wait_ms: float = 0.0
    group_prompts: bool = False
    prefix_cache: bool = True
    swap_space_gib: float = 4.0
    trace: str | None = None
    overlap: bool | None = None
    deterministic: bool = False
    streaming: bool = False
    streaming_window: int | None = None
    streaming_sink: int = 4
    readers: ReaderLimits = field(default_factory=ReaderLimits)  # of an AsyncEngine
    sessions: SessionLimits = field(default_factory=SessionLimits)
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None  # of the weights, rounded to nearest while loading
    kv_cache_dtype: KVCacheDtype = "auto"
    prompt_attention: PromptAttention = "paged"

    def __post_init__(self) -> None:
        if not _is_number(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidRequestError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}; it must lie in (0, 1]"
            )
        if not _is_number(self.swap_space_gib) or not 0 <= self.swap_space_gib < float("inf"):
            raise InvalidRequestError(
                f"swap_space_gib is {self.swap_space_gib!r}; it must be 0 (no swap) or more"
            )
        for name in (
            "max_model_len",
            "max_batch_size",
            "max_total_token_num",
            "max_num_batched_tokens",
            "page_size",
            "max_queue_len",
            "min_batch_size",
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidRequestError(f"{name} is {value!r}; it must be a positive integer")
        if self.streaming_window is not None:
            object.__setattr__(self, "streaming", True)
        if self.streaming:
            self._check_streaming()
        _check_gate(self.min_batch_size, self.max_wait_ms)
        if isinstance(self.policy, str) or not callable(self.policy):
            _check_choice("policy", self.policy, QUEUE_POLICY_NAMES)
        if self.victim_policy is not None:
            _check_choice("victim_policy", self.victim_policy, VICTIM_POLICY_NAMES)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("prompt_attention", self.prompt_attention, PROMPT_ATTENTIONS)
        if self.dtype is not None:
            _check_choice("dtype", self.dtype, DTYPES)

    def _check_streaming(self) -> None:
        if self.trace is not None:
            raise InvalidRequestError(
                "trace and streaming are both set: a replay does not know pages that were given "
                "back, so leave one of the two out"
            )
        if self.deterministic:
            raise InvalidRequestError(
                "deterministic and streaming are both set: which pages are left when a token is "
                "computed depends on chunks, and its last bits on that, so leave one of the two out"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_gate(min_batch_size: int, max_wait_ms: float) -> None:
    if not _is_number(max_wait_ms) or not 0 <= max_wait_ms <= MAX_WAIT_MS:
        raise InvalidRequestError(
            f"max_wait_ms is {max_wait_ms!r}; it must lie in [0, {MAX_WAIT_MS:g}]"
        )
    if (min_batch_size > 1) != (max_wait_ms > 0):
        raise InvalidRequestError(
            f"min_batch_size is {min_batch_size} and max_wait_ms {max_wait_ms:g}: newcomers are "
            "held back only with both, so set the other one too (e.g. 2 and 10) or neither"
        )


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidRequestError(f"{name} {value!r} is unknown; choose one of {', '.join(known)}")
