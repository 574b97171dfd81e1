"""A decoder's weights on the device, matrices that are multiplied together in one piece."""

from dataclasses import dataclass

import torch

from etserve.models.types import DecoderSpec
from etserve.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """For torch.nn.functional.linear."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One layer's."""

    input_norm: torch.Tensor  # [hidden]
    qkv: DeviceMatrix  # q, k and v one below the other
    head_norms: tuple[torch.Tensor, torch.Tensor] | None  # of q and k, [head_dim]
    o: DeviceMatrix
    post_norm: torch.Tensor  # [hidden]
    gate_up: DeviceMatrix  # gate above up
    down: DeviceMatrix


class DeviceWeights:
    """Read one tensor at a time, each moved before the next is read. Raises ModelError as they are read."""

    def __init__(self, spec: DecoderSpec, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = weights, dtype, device
        self.num_bytes = 0
        self.embedding = self._vector("embedding.weight")  # [vocab, hidden]
        self.layers = tuple(self._layer(f"layers.{index}", spec) for index in range(spec.num_layers))
        self.final_norm = self._vector("final_norm.weight")
        self.head = self.embedding if spec.tied_head else self._vector("head.weight")  # [vocab, hidden]

    def _layer(self, at: str, spec: DecoderSpec) -> DeviceLayer:
        norms = None
        if spec.qk_norm:
            norms = self._vector(f"{at}.q_norm.weight"), self._vector(f"{at}.k_norm.weight")
        return DeviceLayer(
            input_norm=self._vector(f"{at}.input_norm.weight"),
            qkv=self._matrix(at, ("q", "k", "v"), has_bias=spec.attention_bias),
            head_norms=norms,
            o=self._matrix(at, ("o",), has_bias=spec.output_bias),
            post_norm=self._vector(f"{at}.post_norm.weight"),
            gate_up=self._matrix(at, ("gate", "up"), has_bias=spec.mlp_bias),
            down=self._matrix(at, ("down",), has_bias=spec.mlp_bias),
        )

    def _matrix(self, at: str, parts: tuple[str, ...], *, has_bias: bool) -> DeviceMatrix:
        weight = self._joined([f"{at}.{part}.weight" for part in parts])
        return DeviceMatrix(weight, self._joined([f"{at}.{part}.bias" for part in parts]) if has_bias else None)

    def _joined(self, names: list[str]) -> torch.Tensor:
        return self._vector(names[0]) if len(names) == 1 else self._counted(torch.cat([*map(self._read, names)]))

    def _vector(self, name: str) -> torch.Tensor:
        return self._counted(self._read(name))

    def _read(self, name: str) -> torch.Tensor:
        return self._source.tensor(name, self._dtype).to(self._device)

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor
