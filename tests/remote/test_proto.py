"""control_pb2.py is what grpcio-tools writes of control.proto."""

import pytest

from tests.pipelines import ROOT

PROTO = "digen_jax/remote/control.proto"


def test_the_generated_file_belongs_to_the_proto(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    assert protoc.main(["protoc", f"-I{ROOT}", f"--python_out={tmp_path}", PROTO]) == 0
    made = PROTO.replace(".proto", "_pb2.py")
    assert (tmp_path / made).read_text() == (ROOT / made).read_text()
