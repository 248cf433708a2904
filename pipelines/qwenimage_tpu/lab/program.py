"""A program as it is handed to the TPU's compiler."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """code: a StableHLO portable artifact. options: a serialized xla.CompileOptionsProto."""

    code: bytes
    options: bytes
