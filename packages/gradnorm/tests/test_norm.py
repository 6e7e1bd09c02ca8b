import math

import pytest
import torch
from torch import nn

from stepstack_gradnorm import Part, _sums, grads_of, tensor_norms, total_norm
from stepstack_testing import HostSyncs, Operations

TYPES = [0, 0.5, 1, 2, 2.5, 3, 6, 7, 16, 40, math.inf]


def reference(tensors, norm_type=2.0):
    flat = [t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in tensors]
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64).flatten().abs() for t in flat]
    whole = torch.cat(wide)
    if norm_type in (0, math.inf):
        return torch.linalg.vector_norm(whole, norm_type).item()
    scale = whole.amax().item() or 1.0
    return scale * torch.linalg.vector_norm(whole / scale, norm_type).item()


def random(*shape, dtype=torch.float32, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype)


def assert_is(norm, expected, dtype=torch.float32):
    assert norm.shape == ()
    assert norm.dtype == dtype
    assert norm.item() == pytest.approx(expected, rel=1e-6 if dtype is torch.float32 else 1e-13, abs=0)


@pytest.mark.parametrize("norm_type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_it_is_the_norm_of_the_concatenation(norm_type, dtype):
    grads = (
        [random(37, 11), random(5, seed=1), random((), seed=2)] if not dtype.is_complex else [random(9), random(4, 5)]
    )
    grads = [
        torch.complex(g, g.flip(0) if g.dim() else g).to(dtype) if dtype.is_complex else g.to(dtype) for g in grads
    ]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert_is(total_norm(grads, norm_type), reference(grads, norm_type), wide)


@pytest.mark.parametrize("norm_type", TYPES)
def test_dtypes_may_mix(norm_type):
    grads = [random(50, dtype=dtype, seed=i) for i, dtype in enumerate([torch.float16, torch.float32, torch.bfloat16])]
    grads += [torch.complex(random(3), random(3, seed=7))]
    assert_is(total_norm(grads, norm_type), reference(grads, norm_type))
    grads += [random(3, dtype=torch.float64)]
    assert_is(total_norm(grads, norm_type), reference(grads, norm_type), torch.float64)


@pytest.mark.parametrize("norm_type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("values", [(2e200, 1.0), (3e-200, 0.0), (2e200, 3e-200, 5.0), (1e300, 1e-308), (1e-320,)])
def test_fp64_gradients_keep_range_and_digits(values, dtype, norm_type):
    grads = [random(4, 3, dtype=torch.float64, seed=seed).mul(value).to(dtype) for seed, value in enumerate(values)]
    assert_is(total_norm(grads, norm_type), reference(grads, norm_type), torch.float64)
    assert_is(total_norm([grads[0][:0], random(2)], norm_type), reference([random(2)], norm_type), torch.float64)
    single = [random(3, seed=5), random(2, seed=6)]
    assert_is(total_norm(grads + single, norm_type), reference(grads + single, norm_type), torch.float64)


@pytest.mark.parametrize("norm_type", TYPES[1:])
def test_a_bad_element_shows_in_fp64_too(norm_type):
    for bad in (math.nan, math.inf):
        norm = total_norm([random(3, dtype=torch.float64), torch.tensor([1.0, bad], dtype=torch.float64)], norm_type)
        assert math.isnan(norm) if math.isnan(bad) else norm == math.inf


@pytest.mark.parametrize(
    "grad",
    [
        random(6, 8).t(),
        random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        random(10, 10)[::2, 1::3],
        random(7, 1).expand(7, 5),
        random(3).expand(4, 3)[:, 1:],
        random(0, 5),
        random(9)[3:],
    ],
    ids=["transposed", "channels_last", "strided", "expanded", "expanded slice", "empty", "offset"],
)
@pytest.mark.parametrize("norm_type", [0, 1, 2, 3, 9, math.inf])
def test_any_layout_counts_each_element_once(grad, norm_type):
    whole = [grad, random(4)]
    assert_is(total_norm(whole, norm_type), reference(whole, norm_type))


@pytest.mark.parametrize("norm_type", [0, 1, 2, 3, 9, math.inf])
def test_an_uncoalesced_sparse_gradient_has_the_norm_of_the_dense_one(norm_type):
    grad = torch.sparse_coo_tensor([[0, 2, 0]], torch.tensor([1.0, 2.0, 3.0]), (4,), check_invariants=True)
    assert_is(total_norm([grad], norm_type), reference([torch.tensor([4.0, 0, 2, 0])], norm_type))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_rows_of_a_sparse_matrix_count():
    grad = random(4, 5).relu()
    assert_is(total_norm([grad.to_sparse_csr(), random(2)]), reference([grad, random(2)]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_counts_as_what_it_holds(dtype):
    grad = random(100).to(dtype)
    assert_is(total_norm([grad]), reference([grad.float()]))


@pytest.mark.parametrize(
    ("grad", "norm"),
    [
        (torch.tensor([300.0], dtype=torch.float16), 300.0),
        (torch.tensor([1e20]), 1e20),
        (torch.tensor([1e-30]), 1e-30),
        (torch.tensor([1e20], dtype=torch.bfloat16), torch.tensor(1e20).bfloat16().item()),
        (torch.full((4,), 1e-30), 2e-30),
        (torch.full((100,), 1e38 / 3), 1e39 / 3),
        (torch.zeros(5), 0.0),
    ],
)
def test_the_range_of_fp32_is_kept(grad, norm):
    assert_is(total_norm([grad]), norm if norm < 3.4e38 else math.inf)


@pytest.mark.parametrize("norm_type", [3, 6, 7, 50])
@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_the_range_is_kept_for_high_powers(norm_type, value):
    grads = [torch.full((10,), value), torch.full((6,), value), torch.zeros(2)]
    assert_is(total_norm(grads, norm_type), reference(grads, norm_type))


@pytest.mark.parametrize("norm_type", TYPES)
@pytest.mark.parametrize("value", [1e20, 1e-30, 1.0])
def test_the_range_is_kept_on_a_machine_without_fp64(monkeypatch, norm_type, value):
    monkeypatch.setattr(_sums, "has_float64", lambda: False)
    grads = [random(1000) * value, torch.zeros(3), (random(50) * value).bfloat16(), random(30, dtype=torch.float16)]
    assert_is(total_norm(grads, norm_type), reference(grads, norm_type))
    assert tensor_norms({"nothing": [], "zero": torch.zeros(2)}, norm_type) == {"nothing": 0, "zero": 0}


def test_sixteen_fp16_tensors_of_norm_30000_do_not_overflow():
    assert_is(total_norm([torch.tensor([3e4], dtype=torch.float16) for _ in range(16)]), 1.2e5)


def test_twenty_million_fp16_ones():
    assert_is(total_norm(torch.ones(20_000_000, dtype=torch.float16)), 4472.136)


@pytest.mark.parametrize("norm_type", [1, 2, 3, 9, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_element_that_is_not_finite_shows(norm_type, bad):
    grads = [random(10), torch.tensor([1.0, bad, 2.0]), random(3)]
    norm = total_norm(grads, norm_type)
    assert norm.isnan() if math.isnan(bad) else norm == math.inf


def test_nothing_has_the_norm_zero():
    for nothing in ([], [None], [torch.empty(0)], Part([]), iter(())):
        assert_is(total_norm(nothing), 0.0)


def test_one_tensor_a_generator_and_a_part_are_taken():
    grads = [random(5), random(6, seed=1)]
    assert_is(total_norm(grads[0]), reference(grads[:1]))
    assert_is(total_norm(g for g in grads), reference(grads))
    assert_is(total_norm(Part(g for g in grads)), reference(grads))
    assert_is(total_norm({"a": grads[0], "b": grads[1]}.values()), reference(grads))


def test_what_occurs_twice_counts_once():
    grad = random(5)
    assert_is(total_norm([grad, grad, grad.view(5), Part([grad])]), reference([grad]))
    assert_is(total_norm([grad[:3], grad[3:]]), reference([grad]))


def test_overlapping_views_are_two_gradients():
    grad = random(10)
    assert_is(total_norm([grad[:6], grad[4:]]), reference([grad[:6], grad[4:]]))


def test_part_norms_come_with_the_norm():
    parts = [Part([random(4)]), Part([]), Part([random(5, seed=1), random(2, seed=2)])]
    norm, norms = total_norm([random(3, seed=3), *parts], part_norms=True)
    assert_is(norm, reference([random(3, seed=3), random(4), random(5, seed=1), random(2, seed=2)]))
    assert norms.tolist() == pytest.approx(
        [reference(part.tensors) if part.tensors else 0 for part in parts], rel=1e-6, abs=0
    )


@pytest.mark.parametrize("norm_type", [0, 1, 2, 9, math.inf])
def test_tensor_norms_are_those_of_each(norm_type):
    grads = {"a": random(4), "b": None, "c": random(3, 3, dtype=torch.bfloat16), "d": random(0), "e": Part([random(2)])}
    norms = tensor_norms(grads, norm_type)
    assert list(norms) == list(grads)
    for name, grad in grads.items():
        assert_is(norms[name], 0.0 if grad is None else total_norm(grad, norm_type).item())
    assert_is(tensor_norms({"a": grads["a"], "same": grads["a"]})["same"], reference([grads["a"]]))
    assert tensor_norms({}) == {}


def test_a_name_may_stand_for_several_gradients():
    norms = tensor_norms({"layer": [random(4), random(3, seed=1)], "nothing": []})
    assert_is(norms["layer"], reference([random(4), random(3, seed=1)]))
    assert_is(norms["nothing"], 0.0)


def test_the_name_of_what_is_no_gradient_is_said():
    with pytest.raises(TypeError, match="'bias'"):
        tensor_norms({"weight": random(2), "bias": torch.ones(2, dtype=torch.int64)})


def test_gradients_are_not_changed():
    grads = [random(100, dtype=torch.complex64), random(10), random(9, dtype=torch.float16)]
    before = [grad.clone() for grad in grads]
    for norm_type in TYPES:
        total_norm(grads, norm_type)
    assert all(torch.equal(grad, old) for grad, old in zip(grads, before, strict=True))


@pytest.mark.parametrize("norm_type", TYPES)
def test_no_host_sync(norm_type):
    grads = [random(20), random(5, dtype=torch.bfloat16), Part([random(3)]), random(4, 4)[:, 1:]]
    with HostSyncs() as syncs:
        total_norm(grads, norm_type, part_norms=True)
        tensor_norms(dict(enumerate(grads)), norm_type)
    assert syncs == []


def operations(tensors):
    with Operations() as counted:
        total_norm(tensors)
    return counted


def test_neighbours_in_a_buffer_cost_what_one_tensor_costs():
    buffer = random(6000)
    assert operations(buffer.view(100, 60).unbind()) == operations(buffer.view(1000, 6).unbind())
    assert_is(total_norm(buffer.view(1000, 6).unbind()), reference([buffer]))


def test_separate_tensors_cost_no_more_operations_than_a_few():
    few, many = [[random(6) for _ in range(count)] for count in (10, 100)]
    assert operations(few) == operations(many)


def test_gradients_of_parameters_keep_their_place():
    module = nn.Linear(3, 2)
    module.weight.grad = random(2, 3)
    weight, bias = grads_of(module.parameters())
    assert weight is module.weight.grad
    assert bias.shape == (0,)
    assert_is(total_norm(grads_of(module.weight)), reference([weight]))


def test_a_parameter_is_followed_to_its_shard():
    parameter = nn.Parameter(random(4))
    parameter.grad = random(4)
    parameter.grad_shard = random(2)
    assert grads_of([parameter])[0] is parameter.grad_shard
    parameter.grad_shard = None
    assert grads_of([parameter])[0] is parameter.grad


def test_a_decoupled_gradient_counts_where_there_is_no_other():
    parameter = nn.Parameter(random(4).bfloat16())
    parameter.decoupled_grad = random(4)
    assert grads_of([parameter])[0] is parameter.decoupled_grad
    parameter.grad = random(4).bfloat16()
    assert grads_of([parameter])[0] is parameter.grad
    parameter.grad_shard = random(2)
    assert grads_of([parameter])[0] is parameter.grad_shard


@pytest.mark.parametrize("name", ["grad_shard", "decoupled_grad"])
def test_a_gradient_in_an_attribute_is_a_tensor(name):
    parameter = nn.Parameter(random(4))
    setattr(parameter, name, [1.0])
    with pytest.raises(TypeError, match=f"{name} is a Tensor or DTensor, not list"):
        grads_of([parameter])


@pytest.mark.parametrize(
    ("grads", "error", "words"),
    [
        ([nn.Parameter(random(2))], TypeError, "grads_of"),
        ([torch.ones(2, dtype=torch.int32)], TypeError, "int32"),
        ([1.0], TypeError, "float"),
        (3, TypeError, "int"),
        ({"a": random(2)}, TypeError, "values"),
        ([[random(2)]], TypeError, "list"),
        ([Part([random(2)]), Part([torch.ones(2, dtype=torch.bool)])], TypeError, "bool"),
    ],
)
def test_what_is_no_gradient_is_refused(grads, error, words):
    with pytest.raises(error, match=words):
        total_norm(grads)


def test_gradients_without_names_have_no_norms_by_name():
    with pytest.raises(TypeError, match="list"):
        tensor_norms([random(2)])


@pytest.mark.parametrize("group", [-100, "world", (None,)])
def test_ranks_agree_over_a_group_only(group):
    with pytest.raises(TypeError, match="agree_over"):
        total_norm([random(2)], agree_over=group)


def test_a_part_inside_of_a_part_is_refused():
    with pytest.raises(TypeError, match="Part"):
        Part([Part([random(2)])])


@pytest.mark.parametrize("groups", [None, 3, ["world"]])
def test_a_group_that_is_none_is_refused(groups):
    with pytest.raises(TypeError, match="sharded_over"):
        Part([random(2)], sharded_over=groups)


@pytest.mark.parametrize("norm_type", [-1, math.nan, -math.inf])
def test_a_norm_type_that_is_none_is_refused(norm_type):
    with pytest.raises(ValueError, match="norm_type"):
        total_norm([random(2)], norm_type)


def test_autograd_and_inference_mode_do_not_matter():
    grad = random(5).requires_grad_()
    norm = total_norm([grad, grad * 2])
    assert not norm.requires_grad
    with torch.inference_mode():
        inference = [random(5), random(6)]
        assert_is(total_norm(inference), reference(inference))
    assert_is(total_norm(inference), reference(inference))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_caller_gets_the_norm():
    grads = [random(1200, 1000)]  # so many that it is not the torch backend that measures them outside
    compiled = torch.compile(lambda: total_norm(grads) * 2, backend="eager")
    assert_is(compiled(), 2 * reference(grads))


def test_tensors_without_data_have_a_norm_without_data():
    norm = total_norm([torch.empty(3, device="meta"), torch.empty(4, device="meta"), random(2)])
    assert (norm.device.type, norm.shape, norm.dtype) == ("meta", (), torch.float32)


def test_a_subclass_with_data_counts():
    class Own(torch.Tensor):
        pass

    assert_is(total_norm([random(3).as_subclass(Own), random(4, seed=1)]), reference([random(3), random(4, seed=1)]))
    assert_is(total_norm(nn.Buffer(random(3))), reference([random(3)]))


def test_jagged_tensors_count_by_their_values():
    jagged = torch.nested.nested_tensor([random(2), random(3, seed=1)], layout=torch.jagged)
    assert_is(total_norm([jagged]), reference([random(2), random(3, seed=1)]))


def test_a_parameter_that_can_say_what_its_shard_is_now_is_asked():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad_shard = torch.ones(3)
    parameter.current_grad_shard = lambda: torch.full((3,), 2.0)
    assert torch.equal(grads_of(parameter)[0], torch.full((3,), 2.0))
