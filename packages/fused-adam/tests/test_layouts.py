"""Parameters and gradients of any strides, wherever they lie."""

import pytest
import torch

from stepstack_fused_adam import FusedAdamW


def gradient(param, seed):
    """In the parameter's own order."""
    grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(param).copy_(grad)


def strided(kind):
    if kind == "channels_last":
        return torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    if kind == "channels_last_3d":
        return torch.randn(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d)
    if kind == "transposed":
        return torch.randn(5, 4).t()
    if kind == "slice of a buffer":
        return torch.randn(30)[7:27].view(4, 5)
    if kind == "with holes":
        return torch.randn(4, 10)[:, ::2]
    if kind == "transposed, with holes":
        return torch.randn(10, 4)[::2].t()
    return torch.randn(4, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_kind", ["as the parameter's", "contiguous", "reversed", "expanded"])
@pytest.mark.parametrize(
    "kind",
    [
        "channels_last",
        "channels_last_3d",
        "transposed",
        "slice of a buffer",
        "with holes",
        "transposed, with holes",
        "contiguous",
    ],
)
def test_strides_are_right(kind, grad_kind, dtype):
    start = strided(kind).to(dtype)
    start = strided(kind).copy_(start) if dtype == torch.float32 else start
    ours = [torch.nn.Parameter(start)]
    theirs = [torch.nn.Parameter(start.detach().float().clone(memory_format=torch.contiguous_format))]
    optimizer = FusedAdamW(ours, lr=0.1, master_weights="fp32")
    reference = torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for seed in range(3):
        grad = ours[0].grad = gradient(ours[0].detach(), seed)
        if grad_kind == "contiguous":
            ours[0].grad = grad.contiguous()
        elif grad_kind == "reversed":
            dims = list(reversed(range(grad.dim())))
            ours[0].grad = grad.permute(dims).contiguous().permute(dims)
        elif grad_kind == "expanded":
            ours[0].grad = grad[:1].expand_as(grad)
        theirs[0].grad = ours[0].grad.float().contiguous()
        optimizer.step()
        reference.step()
    assert ours[0].stride() == start.stride()
    # A last bit of the fp32 weight may round a 16-bit one the other way; wrong strides are off by the learning rate.
    rtol = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(ours[0].float(), theirs[0].to(dtype).float(), rtol=rtol, atol=1e-6)
    assert ours[0].untyped_storage().data_ptr() == start.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_channels_last_weights_with_contiguous_views_of_a_flat_gradient(dtype, backend):
    shapes = [(8, 4, 3, 3), (4, 8, 3, 3), (6,)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    ours = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for param in ours[:2]:
        param.data = param.data.to(memory_format=torch.channels_last)
    theirs = [torch.nn.Parameter(param.detach().float().contiguous().clone()) for param in ours]
    optimizer = FusedAdamW(ours, lr=0.1, master_weights="fp32", backend=backend)
    reference = torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    buffer = torch.empty(sum(sizes), dtype=dtype)
    for param, view in zip(ours, buffer.split(sizes), strict=True):
        param.grad = view.view(param.shape)
    for seed in range(3):
        buffer.copy_(torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)))
        for param, twin in zip(ours, theirs, strict=True):
            twin.grad = param.grad.float()
        optimizer.step()
        reference.step()
    for param, twin in zip(ours, theirs, strict=True):
        weight = param.detach() if dtype == torch.float32 else optimizer.state[param]["master_weight"]
        torch.testing.assert_close(weight, twin.detach(), rtol=1e-5, atol=1e-6)
        assert param.is_contiguous(memory_format=torch.channels_last) or param.dim() == 1


def test_a_gradient_may_move_every_step():
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape).bfloat16()) for shape in [(4, 5), (6,)]] for _ in range(2))
    optimizer, twin = FusedAdamW(ours, master_weights="fp32"), FusedAdamW(theirs, master_weights="fp32")
    kept = []
    for seed in range(4):
        for param, other in zip(ours, theirs, strict=True):
            param.grad, other.grad = gradient(param.detach(), seed), gradient(param.detach(), seed)
        if seed == 2:
            ours[0].grad = ours[0].grad.t().contiguous().t()
        kept.append([param.grad for param in ours])  # so that no address comes back
        optimizer.step()
        twin.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], twin.state_dict()["state"], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3), (4, 0, 2, 2)])
@pytest.mark.parametrize(
    "options", [{}, {"master_weights": "fp32"}, {"master_weights": "remainder"}, {"exp_avg_dtype": "block8"}]
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_parameter_of_no_elements_counts_and_is_saved_as_torchs_is(shape, options, alone):
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    empty = torch.empty(shape, dtype=dtype)
    params = [torch.nn.Parameter(empty), torch.nn.Parameter(empty.transpose(0, -1))]
    if not alone:
        params.append(torch.nn.Parameter(torch.ones(3, dtype=dtype)))
    optimizer = FusedAdamW(params, lr=0.1, **options)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    other = torch.optim.AdamW([torch.nn.Parameter(param.detach().clone()) for param in params])
    other.load_state_dict(optimizer.state_dict())
    assert [state["step"].item() for state in other.state.values()] == [2] * len(params)
    assert optimizer.state[params[0]]["exp_avg"].shape == shape


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_gradient_with_a_lazy_minus_is_the_gradient(shape):
    ours, theirs = torch.nn.Parameter(torch.full(shape, 2.0)), torch.nn.Parameter(torch.full(shape, 2.0))
    optimizer, reference = FusedAdamW([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1, foreach=False)
    for step in range(3):
        for param in (ours, theirs):
            plain = torch.full(shape, -1.0 - step)
            param.grad = torch._neg_view(-plain) if step % 2 else plain
            assert param.grad.is_neg() == bool(step % 2)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_parameter_with_a_lazy_minus_is_refused_by_name():
    with pytest.raises(ValueError, match=r"parameter 'w' is a view that stands for the negative .* resolve_neg"):
        FusedAdamW([("w", torch.nn.Parameter(torch._neg_view(torch.ones(3))))])
