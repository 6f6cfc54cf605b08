"""Notebook 01: the cost of operations, of reading results on the host, and of one stray type."""

from collections.abc import Callable

import mlx.nn as nn
import numpy as np
import plotly.graph_objects as go

from .. import records
from ..experiments.dispatch import (
    AHEAD,
    ALONE,
    CLEAN,
    FUSED,
    K_CALLS,
    LOCK,
    LONG,
    NO_STREAM,
    NOT_AHEAD,
    ONE_GATHER,
    ROUTING_READ,
    STRAY,
    Recorded,
    Timed,
    alone_slowdown,
    implied_operation_us,
    operations_of_a_layer,
    token_model,
)
from ..plots import charts, style


def operation_bars(here: Timed, gpu: Recorded) -> go.Figure:
    """What one operation costs, chained and waited for, here and on the recorded GPU."""
    chained, waited = (gpu.operation.median_s(n) * 1e6 for n in ("chained", "evaluated"))
    mine = [here.median_s(n) * 1e6 for n in ("chained", "evaluated")]
    claimed = records.PUBLISHED["PR 90"]["one dispatch (us)"]
    n = len(gpu.operation.samples["built"])
    return charts.bars(
        {style.HERE: here.samples, gpu.name: gpu.operation.samples},
        f"Waiting for an operation costs {waited / chained:.0f} times what sending it costs",
        "us an operation",
        f"On the GPU an operation in a chain costs {chained:.1f} us and one that is waited for "
        f"{waited:.0f} us; here {mine[0]:.1f} and {mine[1]:.0f} us.",
        note=f"n={n}, warm-up 3; {charts.recorded_note(gpu.machine)}",
        scale=1e6,
        marks=[(i, claimed, f"{claimed:.0f} us (PR 90)") for i in range(2)],
    )


def expert_bars(here: Timed, gpu: Recorded, shape: str) -> go.Figure:
    """One layer's experts in K calls, in one gather, fused: here and on the recorded GPU."""
    small, large = gpu.experts["qwen3.5-35b-a3b"], gpu.experts["qwen3.5-122b-a10b"]
    device, dtype = gpu.machine["gpu"], here.config["dtype"].split(".")[-1]
    gain, more = (
        [t.ratio(*steps) for t in (small, large, here)]
        for steps in ((K_CALLS, ONE_GATHER), (ONE_GATHER, FUSED))
    )
    return charts.bars(
        {
            f"{style.HERE} ({shape})": here.samples,
            f"{device} (35B-A3B)": small.samples,
            f"{device} (122B-A10B)": large.samples,
        },
        f"One gather in place of K calls: {gain[0]:.2f}x on the GPU, {gain[2]:.2f}x here",
        "us for one layer's experts",
        f"Fusing gate and up brings {more[0]:.2f}x more (35B-A3B), {more[1]:.2f}x (122B-A10B), "
        f"{more[2]:.2f}x here.",
        note=f"bfloat16, here {dtype}; {charts.recorded_note(gpu.machine)}",
        scale=1e6,
    )


def count_bars(model: nn.Module, gpu: Recorded) -> go.Figure:
    """Operations in a decoded token's layer, counted in MLX's graph."""
    mine = [sum(o.values()) for o in operations_of_a_layer(model)]
    dense, moe = gpu.operations["dense"], gpu.operations["moe"]
    lost = implied_operation_us(gpu)
    return charts.bars(
        {
            "": {
                "dense, on the GPU": [dense],
                "MoE, on the GPU": [moe],
                "Qwen3.5-MoE, on the GPU": gpu.layer_operations,
                "the model here": mine,
            }
        },
        f"An MoE layer runs {moe} operations where a dense one runs {dense}",
        "operations in a layer",
        f"By issue 124's own speeds an operation would cost {lost['dense']:.1f} us in its dense "
        f"model and {lost['moe']:.1f} us in its MoE model.",
        digits=2,
        note="views not counted; whiskers: quartiles over the layers; where MLX has no kernel for "
        f"a norm or a rotation, as on a CPU, it runs several; {charts.recorded_note(gpu.machine)}",
    )


def alone_bars(gpu: Recorded) -> go.Figure:
    """The dense and the MoE model with every operation in a command buffer of its own."""
    slower, told = alone_slowdown(gpu), records.PUBLISHED["issue 124"]
    lost = {n: told[f"{n}, Python"] / told[f"{n}, Swift"] for n in slower}
    return charts.bars(
        {
            label: {how: gpu.settings[how][n].samples[AHEAD] for how in (CLEAN, ALONE)}
            for label, n in (("dense", "dense"), ("MoE", "moe"))
        },
        f"Every operation sent alone: the dense model {slower['dense']:.2f}x slower, "
        f"the MoE model {slower['moe']:.2f}x",
        "ms a token, 8 layers",
        f"The same overhead on each operation costs the MoE model "
        f"{slower['moe'] / slower['dense']:.2f} times as much as the dense one, not "
        f"{lost['moe'] / lost['dense']:.1f} times.",
        note="D=2048, MLP of 8 x 512, 8 layers",
        scale=1e3,
        card=gpu.machine,
    )


def over_ahead(timed: Timed, name: str) -> str:
    """How much more a token takes than in mlx-lm's own loop, as a percentage."""
    return f"{timed.ratio(name, AHEAD) - 1:+.0%}"


def loop_bars(here: Timed, gpu: Recorded, model: str) -> go.Figure:
    """The variants of one decode loop, here and on the recorded GPU."""
    layers = len(gpu.layer_operations)
    read_ms = (gpu.loops.median_s(ROUTING_READ) - gpu.loops.median_s(AHEAD)) / layers * 1e3
    return charts.bars(
        {
            f"{style.HERE} ({model})": here.samples,
            f"{gpu.name} (35B-A3B, {layers} layers)": gpu.loops.samples,
        },
        f"Reading every layer's routing costs {read_ms:.2f} ms a layer on the GPU",
        "ms a token",
        f"On the GPU a token takes {over_ahead(gpu.loops, ROUTING_READ)} with every layer's "
        f"routing read, {over_ahead(gpu.loops, NOT_AHEAD)} when each token is read before the next "
        f"is scheduled, {over_ahead(gpu.loops, LOCK)} with a lock.",
        note=f"bfloat16; {charts.recorded_note(gpu.machine)}",
        scale=1e3,
    )


def buffer_bars(gpu: Recorded) -> go.Figure:
    """The MoE model under MLX's settings for command buffers."""
    ms = {
        loop: [gpu.settings[k]["moe"].median_s(loop) * 1e3 for k in (LONG, ALONE)]
        for loop in (AHEAD, ROUTING_READ)
    }
    plain, read = ms.values()
    return charts.bars(
        {loop: {k: v["moe"].samples[loop] for k, v in gpu.settings.items()} for loop in ms},
        "Long command buffers make a plain token fast and a read of the routing slow",
        "ms a token, MoE of 8 layers",
        f"From 1000 operations a command buffer to 1, a plain token goes from {plain[0]:.1f} to "
        f"{plain[1]:.1f} ms, one with every routing read from {read[0]:.1f} to {read[1]:.1f} ms.",
        scale=1e3,
        card=gpu.machine,
    )


def promotion_bars(here: Timed, gpu: Recorded, model: str) -> go.Figure:
    """A model in bfloat16 with one float32 scalar in it, and without."""
    there = f"{gpu.name} (35B-A3B, {len(gpu.layer_operations)} layers)"
    sources = {f"{style.HERE} ({model})": here, there: gpu.promotion}
    times = [
        f"{here.ratio(STRAY, CLEAN):.2f}x the time here",
        f"{gpu.promotion.ratio(STRAY, CLEAN):.2f}x on the GPU",
    ]
    types = ", ".join(here.config["dtype_in_the_last_layer"]).replace("mlx.core.", "")
    return charts.bars(
        {name: t.samples for name, t in sources.items()},
        "One float32 scalar: " + ", ".join(times),
        "ms a token",
        f"With the scalar the last layer's activations are {types}: it reaches the end, and its "
        "price depends on which type the device computes faster.",
        note="bfloat16 model, one run for each sample, ratios round by round; "
        + charts.recorded_note(gpu.promotion_machine),
        scale=1e3,
    )


def verdicts(gpu: Recorded, experts: Timed, promoted: Timed) -> list[charts.Verdict]:
    """The verdicts of notebook 01, for ``charts.verdicts``.

    Args:
        gpu (Recorded): The recorded run.
        experts (Timed): ``expert_calls`` on this machine.
        promoted (Timed): ``promotion`` on this machine.
    """
    device = gpu.machine["gpu"].removeprefix("NVIDIA ")
    small, large = gpu.experts["qwen3.5-35b-a3b"], gpu.experts["qwen3.5-122b-a10b"]
    chained, waited = (gpu.operation.median_s(n) * 1e6 for n in ("chained", "evaluated"))
    slower = alone_slowdown(gpu)
    promotions = {style.HERE: promoted, gpu.name: gpu.promotion}
    times = [f"{t.ratio(STRAY, CLEAN):.2f}x the time on {n}" for n, t in promotions.items()]
    return [
        (
            "B1",
            "a dispatch costs about 30 us of CPU time and dominates a streamed token",
            "depends on",
            f"whether the host waits: {chained:.1f} us in a chain, {waited:.0f} us when it does "
            f"({device}); no Apple GPU was here",
        ),
        (
            "B2",
            "one gather for each projection in place of top-k calls",
            "depends on",
            f"the device: {small.ratio(K_CALLS, ONE_GATHER):.2f}x for a 35B-A3B layer's experts "
            f"and {large.ratio(K_CALLS, ONE_GATHER):.2f}x for 122B-A10B's on the {device}, "
            f"{experts.ratio(K_CALLS, ONE_GATHER):.2f}x here",
        ),
        (
            "B3",
            "gate and up in one buffer, one call fewer",
            "depends on",
            f"the device and the size: a further {small.ratio(ONE_GATHER, FUSED):.2f}x and "
            f"{large.ratio(ONE_GATHER, FUSED):.2f}x on the {device}, "
            f"{experts.ratio(ONE_GATHER, FUSED):.2f}x here",
        ),
        (
            "C1",
            "an MoE model suffers 7.3x where a dense one suffers 1.33x, from operations",
            "refuted",
            f"{gpu.operations['moe']} operations a layer against {gpu.operations['dense']}; the "
            f"same overhead on each slows them {slower['moe']:.2f}x and {slower['dense']:.2f}x",
        ),
        (
            "C2",
            "a host read of every token serializes generation; scheduling ahead hides it",
            "confirmed",
            f"{over_ahead(gpu.loops, NOT_AHEAD)} of a token on the {device}: real, and far from 7x",
        ),
        (
            "C3",
            "a global lock around evaluation, and no stream context, are to blame",
            "refuted",
            f"{over_ahead(gpu.loops, LOCK)} and {over_ahead(gpu.loops, NO_STREAM)} of a token on "
            f"the {device}",
        ),
        (
            "C4",
            "one stray float32 scalar promotes the graph and slows everything",
            "depends on",
            "the device: it does reach the last layer; then " + ", ".join(times),
        ),
    ]


def dial(D: int, F: int, other_operations: int = 40) -> Callable[[int, int, int], go.Figure]:
    """The function behind the sliders of notebook 01.

    Args:
        D, F (int): Hidden size and expert hidden size.
        other_operations (int): Operations of a layer besides its experts'.

    Returns:
        Callable[[int, int, int], go.Figure]: From top-k, layers and memory bandwidth in GB/s to
        tokens per second over the cost of a dispatch.
    """
    claimed = records.PUBLISHED["PR 90"]["one dispatch (us)"]

    def look(top_k: int, layers: int, bandwidth: int):
        cost = np.arange(0, 61, 2.0)
        nbytes = top_k * 3 * D * F * 9 / 16
        fig = style.figure(
            "A model, not a measurement: the cost of a dispatch that sets the pace",
            "cost of one dispatch (us)",
            "tok/s",
            note=f"D={D}, F={F}, {layers} layers, top-{top_k}, {other_operations} other "
            f"operations a layer; experts at {bandwidth} GB/s, all in memory",
            card="",
        )

        def tok_s(calls, us):
            return 1 / token_model(calls, layers, us, other_operations, nbytes, bandwidth)

        at = {}
        for i, (name, calls) in enumerate({K_CALLS: 3 * top_k, ONE_GATHER: 3, FUSED: 2}.items()):
            y = [tok_s(calls, us) for us in cost]
            fig.add_scatter(x=cost, y=y, name=name, mode="lines", line=style.look(i)["line"])
            at[name] = tok_s(calls, claimed)
        top = bandwidth * 1e9 / (layers * nbytes)
        style.ceiling(fig, top, "memory bandwidth", log=True)
        style.ceiling(fig, claimed, f"{claimed:.0f} us (PR 90)", axis="x")
        fig.update_yaxes(type="log", dtick=1, range=[0, float(np.log10(top * 1.5))])
        told = ", ".join(f"{n} {v:.1f}" for n, v in at.items())
        return style.describe(
            fig,
            alt=f"Lines of tok/s over the cost of a dispatch. At {claimed:.0f} us: {told}. "
            f"Ceiling {top:.0f} tok/s.",
            finding=f"At {claimed:.0f} us a dispatch, one gather for each projection would give "
            f"{at[ONE_GATHER] / at[K_CALLS]:.2f} times the speed of K calls.",
        )

    return look
