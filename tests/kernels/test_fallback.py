"""Where the kernels cannot be used, models compute with MLX's. This needs no llvmlite."""

import mlx.core as mx
import pytest

from moelab import StreamConfig, kernels
from moelab.kernels import code, modules, quantized
from moelab.streaming.model import load_model


def test_without_llvmlite_and_on_a_gpu(moe, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(modules.mx, "default_device", lambda: mx.gpu)
        assert not kernels.available()
        with pytest.raises(ValueError, match="for the CPU backend"):
            kernels.check()
    monkeypatch.setattr(code, "llvm", None)
    assert not kernels.available() and not quantized.supported(4, 64, 128)
    assert StreamConfig().resolved().kernels == "mlx"
    asked = StreamConfig(kernels="fast")
    assert asked.resolved() == asked
    with pytest.raises(ValueError, match="StreamConfig.kernels: 'fast'"):
        load_model(moe, asked)
    with load_model(moe, StreamConfig(kernels="auto"))[0] as model:
        assert not kernels.used(model)
        assert model(mx.array([[5, 6, 7]])).shape[:2] == (1, 3)
    monkeypatch.setattr(modules.mx, "default_device", lambda: mx.cpu)
    with pytest.raises(ValueError, match="pip install llvmlite"):
        kernels.check()
