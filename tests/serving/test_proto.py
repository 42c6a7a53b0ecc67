"""The checked-in generated code is what the .proto gives, and the messages keep their promises."""

import subprocess
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from swiftjax.serving.proto import swiftjax_pb2 as pb
from tests.environments import ROOT, programs_of

PROTO = "swiftjax/serving/proto/swiftjax.proto"
GENERATED = ("swiftjax_pb2.py", "swiftjax_pb2.pyi", "swiftjax_pb2_grpc.py")
# The version that `make proto` uses. It needs an older protobuf than the one installed beside us.
TOOLS = "grpcio-tools==1.75.1"


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    python = programs_of("proto", TOOLS) / "python"
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [str(python), "-m", "grpc_tools.protoc", "-I.", *outputs, PROTO], cwd=ROOT, check=True
    )
    for name in GENERATED:
        fresh = (tmp_path / PROTO).with_name(name).read_text()
        assert (ROOT / PROTO).with_name(name).read_text() == fresh, f"{name}: run make proto"


def test_every_option_says_whether_it_was_set() -> None:
    for message in (pb.SamplingOptions, pb.StopOptions):
        for field in message.DESCRIPTOR.fields:
            assert field.is_repeated or field.has_presence, field.full_name


_PREFIXES = {"FinishReason": "FINISH_REASON_", "LogprobsMode": "LOGPROBS_MODE_"}


def test_names_follow_the_style_guide() -> None:
    services = pb.DESCRIPTOR.services_by_name.values()
    for method in (method for service in services for method in service.methods):
        assert method.input_type.name == f"{method.name}Request"
        assert method.output_type.name == f"{method.name}Response"
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
        assert all(value.name.startswith(_PREFIXES[enum.name]) for value in enum.values)
    assert pb.DESCRIPTOR.package == "swiftjax.v1"


def test_seed_has_64_bits_and_there_are_no_maps() -> None:
    seed = pb.SamplingOptions.DESCRIPTOR.fields_by_name["seed"]
    assert seed.type == FieldDescriptor.TYPE_UINT64
    messages: list[Descriptor] = list(pb.DESCRIPTOR.message_types_by_name.values())
    assert not any(message.nested_types for message in messages)
