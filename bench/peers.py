"""Times the MoE block beside those of torch and transformers on the same GPU, in one run, with random weights alike.

    python -m bench.peers [--csv FILE]

One peer is softmax, topk and normalisation in torch. The other is transformers' MixtralSparseMoeBlock with the
grouped_mm experts. Each runs in a CUDA graph. Both rotate over the same number of layers as bench.kernels does, so
weights are cold, and take means over as many draws of the input. torch and transformers have to be installed; the
engine itself does not need them.
"""

from pathlib import Path
from statistics import mean

try:
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
except ImportError:
    torch = None

from bench import kernels
from bench.program import make_parser, run
from colibri.errors import ColibriError


def median_time(step, layers):
    """Returns the median microseconds a layer of a graph that calls step(layer) for each layer."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for layer in range(layers):
            step(layer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(layers):
                step(layer)
        return kernels.time_launches(stream.cuda_stream, graph.replay, 20) / layers


def router(tokens, experts, k):
    logits = torch.randn(8, tokens, experts, device="cuda")

    def step(layer):
        weights, _ = torch.topk(torch.softmax(logits[layer], -1, dtype=torch.float), k, dim=-1)
        return weights / weights.sum(-1, keepdim=True)

    return median_time(step, 8)


def mixtral_block(shape):
    config = MixtralConfig(hidden_size=shape["hidden"], intermediate_size=shape["ffn"],
                           num_local_experts=shape["num_experts"], num_experts_per_tok=shape["k"])
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        blocks = [MixtralSparseMoeBlock(config).to(torch.bfloat16) for _ in range(shape["num_layers"])]
    for number, block in enumerate(blocks):
        blocks[number] = block.to_empty(device="cuda").eval()
        for parameter in block.parameters():
            parameter.data.normal_(std=0.03)
    return blocks


def time_blocks(blocks, tokens, hidden):
    """Returns the median microseconds a layer of the blocks, for random rows."""
    x = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16)
    return median_time(lambda layer: blocks[layer](x), len(blocks))


def main():
    parser = make_parser("peers", __doc__)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append the rows there")
    arguments = parser.parse_args()
    if torch is None:
        raise ColibriError("torch and transformers", "not installed", "both, to be compared with", "install them")
    rows = []
    for name in ("32x2-4096-14336", "128x8-2048-768"):
        shape, bench = kernels.SHAPES[name], kernels.Bench(name)
        blocks = mixtral_block(shape)
        for tokens in (1, 4, 16, 32):
            graphs = [range(shape["num_layers"])]
            ours, _ = bench.draws(kernels.BLOCK, tokens, graphs)
            ours_router, _ = bench.time(["router"], tokens, graphs)
            peer = mean(time_blocks(blocks, tokens, shape["hidden"]) for _ in range(kernels.DRAWS))
            peer_router = router(tokens, shape["num_experts"], shape["k"])
            for op, us, them in (("block", ours, peer), ("router", ours_router, peer_router)):
                case = f"{name} T={tokens} {op}"
                print(f"{case:40} {us:8.1f} us, peer {them:8.1f} us, {them / us:5.2f} times ours", flush=True)
                rows += [(case, "time", f"{us:.1f}", "us"), (case, "peer", f"{them:.1f}", "us")]
    if arguments.csv:
        kernels.save(arguments.csv, "peers", rows)


if __name__ == "__main__":
    run(main)
