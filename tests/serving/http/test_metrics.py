"""What /metrics tells: every promised name, true numbers, and nothing of any request's text."""

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from swiftjax.engine.request import StreamOutput
from swiftjax.serving.engine_watch import Rate
from swiftjax.serving.metrics import Metrics
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from tests.serving.harness import join, until
from tests.serving.http.harness import KEY, HttpService, KeyEntry, make_keys, run
from tests.stalls import tried_again_after_stalls

COMPLETE = "/v1/completions"
GAUGES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "kv_blocks",
    "kv_session_blocks",
    "cache_config_info", "device_memory_bytes", "engine_up", "engine_heartbeat_age_seconds",
    "model_info", "draining",
    "request_queue_size", "active_batch_size", "tokens_per_second", "gpu_memory_used",
)  # fmt: skip
COUNTERS = (
    "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "preemptions_total", "requests_total", "aborts_total", "shed_total",
    "auth_failures_total", "jit_compiles_total", "jit_compile_seconds_total",
)  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "prefill_time_seconds", "decode_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "step_seconds", "step_tokens",
    "frontend_loop_lag_seconds",
)  # fmt: skip
Samples = dict[str, float]


async def scrape(service: HttpService) -> Samples:
    """Every sample by its name and labels other than the model's, which all must have."""
    response = await service.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for name, labels, value, *_ in family.samples:
            assert labels.pop("model_name") == "bytes", name
            text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            samples[f"{name.removeprefix('swiftjax_')}{{{text}}}"] = value
    return samples


def test_every_promised_name_is_there() -> None:
    async def body(service: HttpService) -> None:
        await service.post(COMPLETE, {"prompt": "a", "max_tokens": 4})
        await service.refused(COMPLETE, {})
        text = (await service.client.get("/metrics")).text
        for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
            for name in names:
                assert f"# TYPE swiftjax_{name} {kind}\n" in text, name

    run(body)


def test_numbers_of_a_few_requests() -> None:
    async def body(service: HttpService) -> None:
        await service.post(COMPLETE, {"prompt": "abc", "max_tokens": 5, "n": 2})
        await service.events(COMPLETE, {"prompt": "abc", "max_tokens": 5})
        await service.refused(COMPLETE, {"prompt": "a", "n": 99})
        async with grpc.aio.insecure_channel(service.listeners.grpc.address) as c:
            stop = pb.StopOptions(max_new_tokens=3)
            stub = pb_grpc.GenerationServiceStub(c)
            await join(stub.Generate(pb.GenerateRequest(text="a", stop=stop)))
        seen = await scrape(service)
        assert seen["requests_total{finish_reason=length,protocol=http,status=OK}"] == 3
        assert seen["requests_total{finish_reason=length,protocol=grpc,status=OK}"] == 1
        assert seen["requests_total{finish_reason=,protocol=http,status=INVALID_ARGUMENT}"] == 1
        assert seen["prompt_tokens_total{}"] == 7
        assert seen["generation_tokens_total{}"] == 18
        assert seen["time_to_first_token_seconds_count{}"] == 3
        assert seen["e2e_request_latency_seconds_count{}"] == 4
        assert seen["request_generation_tokens_bucket{le=5.0}"] == 4
        assert seen["request_generation_tokens_bucket{le=2.0}"] == 0
        assert seen["request_queue_time_seconds_count{}"] == 4
        assert seen["decode_time_seconds_count{}"] == 4
        assert seen["step_seconds_count{phase=mixed}"] + seen[
            "step_seconds_count{phase=decode}"
        ] == (service.num_steps)
        assert seen["engine_up{}"] == 1 and seen["draining{}"] == 0
        assert seen["gpu_memory_used{}"] == 7
        assert seen["device_memory_bytes{device=gpu:1,kind=limit}"] == 10
        assert seen["kv_cache_usage_ratio{}"] == 0
        blocks = [seen[f"kv_blocks{{state={state}}}"] for state in ("used", "cached", "free")]
        assert blocks[0] == 0 and sum(blocks) == service.engine.stats().num_pages

    run(body)


@tried_again_after_stalls
def test_gauges_while_requests_run_and_wait_and_what_a_leaving_client_counts() -> None:
    async def body(service: HttpService) -> None:
        request = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
        calls = [asyncio.create_task(service.client.post(COMPLETE, json=request)) for _ in range(3)]
        await until(lambda: service.engine.stats().num_waiting == 2)
        seen = await scrape(service)
        assert seen["num_requests_running{}"] == seen["active_batch_size{}"] == 1
        assert seen["num_requests_waiting{}"] == seen["request_queue_size{}"] == 2
        assert seen["kv_cache_usage_ratio{}"] > 0
        assert 0 <= seen["engine_heartbeat_age_seconds{}"] < 1
        for call in calls:
            call.cancel()
        await until(service.is_idle)
        seen = await scrape(service)
        assert seen["aborts_total{reason=client}"] == 3
        assert seen["requests_total{finish_reason=,protocol=http,status=CANCELLED}"] == 3
        await service.client.post(COMPLETE, json={"prompt": ["a"] * 9, "max_tokens": 2})
        assert (await scrape(service))["shed_total{reason=queue_full}"] == 1

    run(body, delay=0.005, max_num_seqs=1, max_queue_len=4)


def test_prefix_cache_counts_tokens_and_failed_keys_are_counted() -> None:
    async def body(service: HttpService) -> None:
        for _ in range(2):
            answer = await service.post(COMPLETE, {"prompt": [1] * 41, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 40}
        await service.client.get("/version", headers={"authorization": "Bearer wrong-key"})
        seen = await scrape(service)
        assert seen["prefix_cache_queries_total{}"] == 82
        assert seen["prefix_cache_hits_total{}"] == 40
        assert seen["auth_failures_total{}"] == 1

    run(body, keys=make_keys(KeyEntry(KEY)))


def test_rate_is_over_whole_seconds() -> None:
    rate = Rate()
    for second in range(100, 130):
        rate.add(second + 0.5, 50)
    assert rate.value(130.1) == 50 and rate.value(134.9) == 30 and rate.value(999.0) == 0


@pytest.mark.parametrize("path", ["/metrics"])
def test_metrics_need_a_key(path: str) -> None:
    async def body(service: HttpService) -> None:
        response = await service.client.get(path, headers={"authorization": ""})
        assert response.status_code == 401

    run(body, keys=make_keys(KeyEntry(KEY)))


def test_a_client_that_leaves_between_two_choices_is_counted() -> None:
    async def outputs() -> AsyncGenerator[StreamOutput, None]:
        yield StreamOutput(
            request_id="x", text="", token_ids=(1,), logprobs=(0.0,), finish_reason="length",
            num_prompt_tokens=1, num_output_tokens=1,
        )  # fmt: skip

    async def main() -> None:
        for num_choices in (1, 2):
            metrics = Metrics()
            stream = metrics.watch(outputs(), "http", num_choices)
            await anext(stream)
            await stream.aclose()
            assert (b'reason="client"} 1.0' in metrics.render()) == (num_choices == 2)

    asyncio.run(main())
