"""`swiftjax serve`: the gRPC and HTTP server in the foreground."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swiftjax.cli import listening as at
from swiftjax.cli import options as opt
from swiftjax.cli.json_log import write_json_lines
from swiftjax.cli.loading import read_chat_template
from swiftjax.cli.policy_file import parse_policy
from swiftjax.cli.reporting import print_line
from swiftjax.cli.systemd import notify
from swiftjax.config import EngineConfig, ReaderLimits, SessionLimits

if TYPE_CHECKING:
    from swiftjax.cli.served_engines import ServedEngines
    from swiftjax.serving.listeners import Listen
    from swiftjax.serving.tracing import Tracer


MaxQueueLen = Annotated[
    int, typer.Option(help="Most requests that may wait; more are refused with a time to retry.")
]
MinBatchSize = Annotated[
    int,
    typer.Option(
        help="With --max-wait-ms: hold newcomers back until so many wait, for larger batches."
    ),
]
MaxWaitMs = Annotated[
    float, typer.Option(help="Hold newcomers back for at most so many milliseconds.")
]
MaxUnreadTokens = Annotated[
    int, typer.Option(help="Pause a request whose client has left so many tokens unread.")
]
MaxPausedSeconds = Annotated[
    float, typer.Option(help="Abort it when the client has read nothing for so long.")
]
MaxSilentSeconds = Annotated[
    float,
    typer.Option(
        min=0,
        help="Refuse calls when the engine has not answered for so long; after twice that it is "
        "killed and started again. 0: never.",
    ),
]
LogFormat = Annotated[
    Literal["text", "json"], typer.Option(help="How log lines on stderr are written.")
]
SessionDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder for pages of idle sessions and for saved ones.",
        exists=True,
        file_okay=False,
        show_default="none",
    ),
]
SessionHostGib = Annotated[
    float, typer.Option(min=0, help="Host memory for pages of idle sessions, in GiB.")
]
SessionDiskGib = Annotated[
    float, typer.Option(min=0, help="Disk for such pages, in GiB; needs --session-dir.")
]
MaxSessions = Annotated[int, typer.Option(min=1, help="Most sessions that are open at a time.")]
SessionShare = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Of them, their tokens and saved ones one API key may have so much."
    ),
]
SessionSavedGib = Annotated[
    float, typer.Option(min=0, help="Disk for saved sessions in --session-dir, in GiB.")
]
DrainSeconds = Annotated[
    float, typer.Option(min=0, help="How long running calls may take after SIGTERM.")
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0, help="Start an engine that died again, so often in 10 minutes; then end with 1."
    ),
]


def serve(
    model: opt.Model,
    host: at.Host = "127.0.0.1",
    port: at.Port = 8000,
    grpc_port: at.GrpcPort = 50051,
    api_key: at.ApiKey = None,
    api_key_file: at.ApiKeyFile = None,
    insecure: at.Insecure = False,
    allowed_origins: at.AllowedOrigins = "",
    tls_cert: at.TlsCert = None,
    tls_key: at.TlsKey = None,
    tls_client_ca: at.TlsClientCa = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    max_total_token_num: opt.MaxTotalTokenNum = None,
    max_model_len: opt.MaxModelLen = None,
    dtype: opt.DtypeOption = None,
    quant_type: opt.QuantTypeOption = None,
    kv_cache_dtype: opt.KVCacheDtypeOption = "auto",
    gpu_memory_utilization: opt.GpuMemoryUtilization = opt.ENGINE_DEFAULTS.gpu_memory_utilization,
    page_size: opt.PageSize = None,
    implementation: opt.Implementation = None,
    chat_template: opt.ChatTemplate = None,
    tool_call_parser: at.ToolCallParser = None,
    max_queue_len: MaxQueueLen = opt.ENGINE_DEFAULTS.max_queue_len,
    max_requests_per_key: at.MaxRequestsPerKey = None,
    policy: opt.PolicyText = None,
    victim_policy: opt.VictimPolicy = None,
    min_batch_size: MinBatchSize = opt.ENGINE_DEFAULTS.min_batch_size,
    max_wait_ms: MaxWaitMs = opt.ENGINE_DEFAULTS.max_wait_ms,
    group_prompts: opt.GroupPrompts = opt.ENGINE_DEFAULTS.group_prompts,
    no_prefix_cache: opt.NoPrefixCache = False,
    deterministic: opt.Deterministic = False,
    prompt_attention: opt.PromptAttentionOption = "paged",
    streaming: opt.Streaming = False,
    streaming_window: opt.StreamingWindow = None,
    streaming_sink: opt.StreamingSink = opt.STREAMING_DEFAULTS.sink,
    swap_space_gib: opt.SwapSpaceGib = opt.ENGINE_DEFAULTS.swap_space_gib,
    max_unread_tokens: MaxUnreadTokens = opt.ENGINE_DEFAULTS.readers.max_unread_tokens,
    max_paused_seconds: MaxPausedSeconds = opt.ENGINE_DEFAULTS.readers.max_paused_seconds,
    session_dir: SessionDir = None,
    session_host_gib: SessionHostGib = opt.ENGINE_DEFAULTS.sessions.host_gib,
    session_disk_gib: SessionDiskGib = opt.ENGINE_DEFAULTS.sessions.disk_gib,
    max_sessions: MaxSessions = opt.ENGINE_DEFAULTS.sessions.max_open,
    session_saved_gib: SessionSavedGib = opt.ENGINE_DEFAULTS.sessions.saved_gib,
    session_share_per_key: SessionShare = opt.ENGINE_DEFAULTS.sessions.owner_share,
    trace: opt.Trace = None,
    load_format: opt.LoadFormatOption = "auto",
    drain_seconds: DrainSeconds = 30.0,
    max_restarts: MaxRestarts = 3,
    max_silent_seconds: MaxSilentSeconds = 60.0,
    log_format: LogFormat = "text",
    otlp_endpoint: at.OtlpEndpoint = None,
    quiet: opt.Quiet = False,
) -> None:
    """Serve a model over gRPC and OpenAI's HTTP interface until SIGTERM or Ctrl-C.

    It is ready (grpc.health.v1, GET /ready) once every step is compiled. The first signal lets
    running calls finish, a second one ends the server at once.
    """
    if 0 < max_silent_seconds < 1:
        text = f"{max_silent_seconds:g} s is less than a step may take: give at least 1, or 0"
        raise typer.BadParameter(text, param_hint="--max-silent-seconds")
    listen = at.read_listen(
        host=host, port=port, grpc_port=grpc_port, api_keys=api_key or [],
        api_key_file=api_key_file, insecure=insecure, allowed_origins=allowed_origins,
        tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca,
    )  # fmt: skip
    policy = at.choose_policy(policy, listen.keys)
    config = EngineConfig(
        model_path=model, load_format=load_format, dtype=dtype,
        quantization=opt.quantization(quant_type), kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len, max_batch_size=max_num_seqs,
        max_total_token_num=max_total_token_num, max_num_batched_tokens=max_num_batched_tokens,
        page_size=page_size, gpu_memory_utilization=gpu_memory_utilization,
        implementation=implementation, prompt_attention=prompt_attention,
        chat_template=read_chat_template(chat_template), max_queue_len=max_queue_len,
        policy=parse_policy(policy), victim_policy=victim_policy, min_batch_size=min_batch_size,
        max_wait_ms=max_wait_ms, group_prompts=group_prompts, prefix_cache=not no_prefix_cache,
        deterministic=deterministic, streaming=streaming, streaming_window=streaming_window,
        streaming_sink=streaming_sink, swap_space_gib=swap_space_gib, trace=trace,
        sessions=SessionLimits(
            folder=None if session_dir is None else str(session_dir), host_gib=session_host_gib,
            disk_gib=session_disk_gib, max_open=max_sessions, owner_share=session_share_per_key,
            saved_gib=session_saved_gib,
        ),
        readers=ReaderLimits(
            max_unread_tokens=max_unread_tokens, max_paused_seconds=max_paused_seconds
        ),
    )  # fmt: skip
    _set_up_log(log_format, quiet=quiet)
    from swiftjax.cli.served_engines import ServedEngines

    beside = {
        "tool_parser": tool_call_parser,
        "tracer": _make_tracer(otlp_endpoint),
    }
    quota_for = partial(at.make_quota, max_requests_per_key, max_queue_len, listen.keys)
    engines = ServedEngines(config, policy=policy, quiet=quiet, quota_for=quota_for, beside=beside)
    raise typer.Exit(_run(engines, listen, drain_seconds, max_restarts, max_silent_seconds))


def _set_up_log(log_format: Literal["text", "json"], *, quiet: bool) -> None:
    if log_format == "json":
        write_json_lines()
    log = logging.getLogger("swiftjax")
    if not quiet and log.level > logging.INFO:
        log.setLevel(logging.INFO)  # what an operator wants to know of a start, in the same place


def _make_tracer(endpoint: str | None) -> "Tracer | None":
    if endpoint is None:
        return None
    from swiftjax.serving.tracing import make_tracer

    return make_tracer(endpoint)


def _run(
    engines: "ServedEngines",
    listen: "Listen",
    drain_seconds: float,
    max_restarts: int,
    max_silent_seconds: float,
) -> int:
    import uvloop

    from swiftjax.cli.file_limit import raise_file_limit
    from swiftjax.serving.server import run_server

    return uvloop.run(
        run_server(
            engines.start,
            replace(listen, max_connections=raise_file_limit()),
            drain_seconds=drain_seconds,
            announce=print_line,
            tell=notify,
            max_restarts=max_restarts,
            max_silent_seconds=max_silent_seconds,
        )
    )
