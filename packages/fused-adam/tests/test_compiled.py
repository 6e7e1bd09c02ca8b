"""The compiled backend: the definition's values, few compilations, and never an exception from a compiler."""

import pytest
import torch

from stepstack_fused_adam import FusedAdamW, _backends, _compiled, _compiler, _native
from stepstack_fused_adam._definition import update_
from stepstack_testing import HostSyncs, Operations

MASTERS = {"master_weights": "fp32"}
NARROW = {"master_weights": "remainder", "exp_avg_dtype": "block8", "exp_avg_sq_dtype": "block8"}


def trained(backend, *, sizes=(150,), steps=3, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in sizes]
    optimizer = FusedAdamW(params, lr=0.1, backend=backend, **(options or MASTERS))
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
        optimizer.step()
    return optimizer


def params_of(optimizer):
    return optimizer.param_groups[0]["params"]


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_it_is_the_torch_backend_to_a_few_ulps():
    one, other = (trained(backend, sizes=[(5, 34), (7,), (1,), ()]) for backend in ("compiled", "torch"))
    for a, b in zip(params_of(one), params_of(other), strict=True):
        torch.testing.assert_close(one.state[a], other.state[b], rtol=2e-6, atol=1e-7)


def test_remainders_and_codes_are_compiled_too():
    one, other = (
        trained(backend, sizes=[(3, 50), (64,), (9,)], **NARROW).state_dict() for backend in ("compiled", "torch")
    )
    for number in range(3):
        a, b = one["state"][number], other["state"][number]
        largest = b["exp_avg"].abs().max()
        assert (a["exp_avg"] - b["exp_avg"]).abs().max() <= 0.02 * largest  # one code
        assert ((a["master_weight"] - b["master_weight"]).abs() > 1e-5).float().mean() < 0.05


@pytest.mark.parametrize("options", [MASTERS, NARROW])
def test_a_skipped_step_changes_nothing(options):
    optimizer = trained("compiled", **options)
    (param,) = params_of(optimizer)
    before = optimizer.state_dict()["state"], param.detach().clone()
    param.grad.view(-1)[3] = torch.inf
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(torch.nan), torch.tensor(2.0)
    optimizer.step()
    torch.testing.assert_close((optimizer.state_dict()["state"], param.detach()), before, rtol=0, atol=0)


def test_fifty_sizes_offsets_and_rates_are_compiled_at_most_three_times():
    buffer, grads = torch.zeros(10_000, dtype=torch.bfloat16), torch.ones(10_000, dtype=torch.bfloat16)
    trained("compiled")
    before = graphs()
    for size in range(130, 180):
        param = torch.nn.Parameter(buffer[size % 7 : size % 7 + size])
        param.grad = grads[:size]
        lr = 0.1 * size if size % 2 else torch.tensor(0.1 * size)
        FusedAdamW([param], lr=lr, weight_decay=size, backend="compiled", **MASTERS).step()
    assert graphs() - before <= 2


@pytest.fixture
def eager(monkeypatch):
    """The definition in the place of the compiled one: how often it was called, for each case asked for."""
    calls = {}

    def compiled(case):
        calls[case] = 0

        def function(params, grads, states, counts, by, decoupled):
            calls[case] += 1
            for tensors in zip(params, grads, states, counts, strict=True):
                update_(*tensors, by, decoupled)

        return function

    monkeypatch.setattr(_compiler, "_functions", {})
    monkeypatch.setattr(_compiler, "_compiled", compiled)
    return calls


def test_warm_up_compiles_ahead_and_changes_nothing(eager):
    for backend, compiled in (("torch", 0), ("auto", 0), ("compiled", 1)):
        param = torch.nn.Parameter(torch.ones(150, dtype=torch.bfloat16))
        frozen = torch.nn.Parameter(torch.ones(150, dtype=torch.float16), requires_grad=False)
        optimizer = FusedAdamW([param, frozen], backend=backend, **MASTERS)
        optimizer.warm_up()
        assert len(eager) == compiled
        assert not optimizer.state
        assert (param == 1).all()
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert list(eager.values()) == [2]


def test_warm_up_sees_that_neighbours_are_one_run(eager, monkeypatch):
    monkeypatch.setattr(_native, "is_here", lambda: False)
    monkeypatch.setattr(_backends, "_WORTH_COMPILING", 1280)
    monkeypatch.setattr(_backends, "_WORTH_CALLING", 1280)
    flat = torch.ones(1280, dtype=torch.bfloat16)
    FusedAdamW([torch.nn.Parameter(piece.clone()) for piece in flat.split(64)], **MASTERS).warm_up()
    assert len(eager) == 0
    FusedAdamW([torch.nn.Parameter(piece) for piece in flat.split(64)], **MASTERS).warm_up()
    assert len(eager) == 1


def test_many_runs_are_called_together(eager):
    sizes = [128 + place for place in range(19)]
    one, other = (trained(backend, sizes=sizes, steps=2) for backend in ("compiled", "torch"))
    assert {case.runs: calls for case, calls in eager.items()} == {8: 1 + 2 * 2, 1: 1 + 2 * 3}
    for a, b in zip(params_of(one), params_of(other), strict=True):
        torch.testing.assert_close(one.state[a], other.state[b], rtol=2e-6, atol=1e-7)


def test_runs_of_equal_and_different_sizes_are_compiled_once_together(monkeypatch):
    monkeypatch.setattr(_compiled, "_TOGETHER", 2)
    trained("compiled", sizes=[130, 140], steps=1)
    before = graphs()
    one, other = (trained(backend, sizes=[150, 150, 160, 170]) for backend in ("compiled", "torch"))
    assert graphs() == before
    for a, b in zip(params_of(one), params_of(other), strict=True):
        torch.testing.assert_close(one.state[a], other.state[b], rtol=2e-6, atol=1e-7)


FAILURES = [
    RuntimeError("no space left on device"),
    PermissionError("the cache is not writable"),
    torch._dynamo.exc.FailOnRecompileLimitHit("the limit of recompilations is hit"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("good_calls", [0, 1, 5])
def test_a_compiler_that_fails_is_replaced_with_one_warning(eager, monkeypatch, error, good_calls):
    compiled = _compiler._compiled

    def failing(case):
        function = compiled(case)

        def sometimes(*arguments):
            if eager[case] == good_calls:
                raise error
            function(*arguments)

        return sometimes

    monkeypatch.setattr(_compiler, "_compiled", failing)
    with pytest.warns(RuntimeWarning, match=f"torch.compile failed on cpu.*{error}") as warned:
        optimizer = trained("compiled", sizes=[130, 140], steps=4)
    assert len(warned) == 1
    assert list(eager.values()) == [good_calls]
    reference = trained("torch", sizes=[130, 140], steps=4)
    for a, b in zip(params_of(optimizer), params_of(reference), strict=True):
        torch.testing.assert_close(optimizer.state[a], reference.state[b], rtol=2e-6, atol=1e-7)


def test_a_compiler_that_cannot_even_begin_is_replaced(monkeypatch):
    def compiled(case):
        raise OSError("the folder of the cache cannot be made")

    monkeypatch.setattr(_compiler, "_functions", {})
    monkeypatch.setattr(_compiler, "_compiled", compiled)
    with pytest.warns(RuntimeWarning, match=r"torch.compile failed on cpu.*OSError: the folder"):
        optimizer = trained("compiled", steps=2)
    assert torch.equal(*params_of(optimizer), *params_of(trained("torch", steps=2)))


def test_a_real_compiler_that_fails_is_replaced(monkeypatch, tmp_path):
    monkeypatch.setattr(_compiler, "_functions", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    broken = torch._inductor.config.patch({"cpp.cxx": ("/bin/false",)})
    with broken, pytest.warns(RuntimeWarning, match="torch.compile failed on cpu"):
        optimizer = trained("compiled", steps=1, exp_avg_dtype=torch.bfloat16)
    reference = trained("torch", steps=1, exp_avg_dtype=torch.bfloat16)
    assert torch.equal(*params_of(optimizer), *params_of(reference))


def test_a_function_that_was_not_compiled_does_nothing():
    param = torch.ones(150)
    with pytest.raises(RuntimeError, match="did not compile"):
        _compiler._update_all_([param], [param], [None], [None], None, True)
    assert (param == 1).all()


def test_out_of_memory_is_not_a_compiler_that_fails(monkeypatch):
    def function(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(_compiler, "_functions", {})
    monkeypatch.setattr(_compiler, "_compiled", lambda case: function)
    with pytest.raises(torch.OutOfMemoryError):
        trained("compiled")


def test_it_neither_waits_nor_depends_on_the_number_of_pieces(eager, monkeypatch):
    monkeypatch.setattr(_compiler, "_get_current_dispatch_mode", lambda: None)
    counts = []
    for numel in (128, 64):
        flat, grad = torch.ones(1280, dtype=torch.bfloat16), torch.ones(1280, dtype=torch.bfloat16)
        params = [torch.nn.Parameter(piece) for piece in flat.split(numel)]
        for param, piece in zip(params, grad.split(numel), strict=True):
            param.grad = piece
        optimizer = FusedAdamW(params, backend="compiled", **MASTERS)
        optimizer.step()
        with HostSyncs() as syncs, Operations() as operations:
            optimizer.step()
        assert syncs == []
        counts.append(dict(operations))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_a_training_loop_that_is_compiled_steps_as_one_that_is_not(backend):
    param, twin = (torch.nn.Parameter(torch.ones(150, dtype=torch.bfloat16)) for _ in range(2))
    optimizer, reference = (FusedAdamW([one], lr=0.1, backend=backend, **MASTERS) for one in (param, twin))

    @torch.compile(backend="aot_eager")
    def train():
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        param.grad, twin.grad = param.detach() + 1, twin.detach() + 1
        train()
        reference.step()
    torch.testing.assert_close(optimizer.state[param], reference.state[twin], rtol=0, atol=0)


def test_under_a_mode_it_is_the_torch_backend():
    with Operations() as operations:
        optimizer = trained("compiled", steps=1)
    assert operations["aten._fused_adamw_"] == 1
    assert torch.equal(*params_of(optimizer), *params_of(trained("torch", steps=1)))


def test_auto_never_compiles_a_small_model(eager):
    trained("auto")
    assert len(eager) == 0
