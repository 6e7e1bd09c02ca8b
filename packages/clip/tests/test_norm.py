import math
import re
import warnings

import pytest
import torch
from torch import nn

from stepstack_clip import clip_coefficient, clip_grad_norm_, clip_grad_value_, multiply_
from stepstack_gradnorm import Part, total_norm
from stepstack_testing import HostSyncs, Operations


def parameters_with(*grads):
    parameters = [nn.Parameter(torch.zeros_like(grad, dtype=grad.dtype)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return parameters


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_the_coefficient_is_that_of_torch_above_and_one_at_or_below():
    norms = torch.tensor([0.0, 0.5, 1.0, 1.0000001, 2.0, 300.0])
    coefficients = clip_coefficient(norms, 1.0)
    assert coefficients[:3].tolist() == [1, 1, 1]
    assert torch.equal(coefficients[3:], 1.0 / (norms[3:] + 1e-6))


def test_a_norm_that_is_not_finite_has_the_coefficient_one():
    assert clip_coefficient(torch.tensor([math.inf, math.nan]), 1.0).tolist() == [1, 1]


def test_the_coefficient_is_not_rounded_to_the_dtype_of_the_gradients():
    coefficient = clip_coefficient(torch.tensor(300.0, dtype=torch.float16), 1.0)
    assert coefficient.dtype == torch.float32
    assert coefficient.item() == pytest.approx(1 / 300, rel=1e-6, abs=0)


def test_an_fp16_gradient_of_300_is_clipped_to_one():
    (parameter,) = parameters_with(torch.tensor([300.0], dtype=torch.float16))
    assert clip_grad_norm_([parameter], 1.0).item() == 300
    assert parameter.grad.item() == pytest.approx(1.0, rel=1e-3)


def test_max_norm_zero_makes_zeros_and_infinity_changes_nothing():
    (parameter,) = parameters_with(random(5))
    before = parameter.grad.clone()
    clip_grad_norm_([parameter], math.inf)
    assert torch.equal(parameter.grad, before)
    clip_grad_norm_([parameter], 0.0)
    assert parameter.grad.tolist() == [0] * 5


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, -math.inf])
def test_a_bad_max_norm_touches_nothing(max_norm):
    (parameter,) = parameters_with(random(5))
    before = parameter.grad.clone()
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_([parameter], max_norm)
    with pytest.raises(ValueError, match="max_norm"):
        clip_coefficient(torch.tensor(2.0), max_norm)
    assert torch.equal(parameter.grad, before)


def test_a_max_norm_on_the_device_is_refused():
    with pytest.raises(TypeError, match="max_norm"):
        clip_coefficient(torch.tensor(2.0), torch.tensor(1.0))


@pytest.mark.parametrize("norm_type", [0.5, 1, 2, 3, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_it_is_a_drop_in_for_torch(norm_type, max_norm):
    grads = [random(4, 3), random(5, seed=1), random(2, seed=2).relu()]
    ours, theirs = parameters_with(*grads), parameters_with(*[grad.clone() for grad in grads])
    ours.append(nn.Parameter(torch.zeros(2)))
    norm = clip_grad_norm_(iter(ours), max_norm, norm_type, False, None)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type, False, None)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for own, other in zip(ours, theirs, strict=False):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-6, atol=0)
    assert ours[-1].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_at_or_below_the_maximum_no_bit_changes(dtype):
    grads = [torch.tensor([3.0, 0.0]).to(dtype), torch.tensor([4.0, -0.0]).to(dtype)]
    before = [grad.clone() for grad in grads]
    for max_norm in (5.0, 5.1):
        assert clip_grad_norm_(parameters_with(*grads), max_norm).item() == 5
    for grad, old in zip(grads, before, strict=True):
        assert grad.view(torch.uint8).tolist() == old.view(torch.uint8).tolist()


def test_what_occurs_twice_is_counted_and_scaled_once():
    one, other = parameters_with(torch.tensor([30.0]), torch.tensor([40.0]))
    tied = nn.Parameter(torch.zeros(1))
    tied.grad = one.grad
    assert clip_grad_norm_([one, other, one, tied], 5.0).item() == 50
    assert torch.cat([one.grad, other.grad]).tolist() == pytest.approx([3.0, 4.0])


def test_a_parameter_in_a_part_counts_there():
    one, other = parameters_with(torch.tensor([30.0]), torch.tensor([40.0]))
    assert clip_grad_norm_([one, other], 5.0, parts=[Part([other])]).item() == 50
    assert torch.cat([one.grad, other.grad]).tolist() == pytest.approx([3.0, 4.0])


def test_one_part_is_taken_and_what_is_no_part_is_refused():
    (parameter,) = parameters_with(torch.tensor([30.0, 40.0]))
    assert clip_grad_norm_([], 100.0, parts=Part([parameter])).item() == 50
    with pytest.raises(TypeError, match="parts is an iterable of Parts, not of list"):
        clip_grad_norm_([], 100.0, parts=[[parameter]])


def test_a_parameter_of_a_sharded_optimizer_is_followed():
    parameter, other = parameters_with(torch.tensor([7.0, 7.0]), torch.tensor([40.0]))
    parameter.grad_shard = torch.tensor([30.0])
    assert clip_grad_norm_([parameter, other], 5.0).item() == 50
    assert parameter.grad_shard.tolist() == pytest.approx([3.0])
    assert parameter.grad.tolist() == [7, 7]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_a_norm_that_is_not_finite_leads_to(bad):
    values = [torch.tensor([1.0, bad]), random(3), random(2, dtype=torch.float16), random(4).to(torch.float8_e5m2)]

    def bits(grads):
        return [grad.view(torch.uint8).tolist() for grad in grads]

    def clipped(**options):
        grads = [value.clone() for value in values]
        norm = clip_grad_norm_(parameters_with(*grads), 1.0, **options)
        assert not norm.isfinite()
        return bits(grads)

    assert clipped() == clipped(nonfinite="keep") == bits(values)
    assert clipped(nonfinite="zero") == bits([torch.zeros_like(value) for value in values])
    for options in (
        {"nonfinite": "raise"},
        {"error_if_nonfinite": True},
        {"error_if_nonfinite": True, "nonfinite": "raise"},
    ):
        grads = [value.clone() for value in values]
        with pytest.raises(RuntimeError, match=r"order 2\.0 .* it is (nan|inf)"):
            clip_grad_norm_(parameters_with(*grads), 1.0, **options)
        assert bits(grads) == bits(values)


@pytest.mark.parametrize("nonfinite", ["zero", "raise"])
def test_a_finite_norm_is_clipped_whatever_the_policy(nonfinite):
    (parameter,) = parameters_with(torch.tensor([30.0, 40.0]))
    clip_grad_norm_([parameter], 5.0, nonfinite=nonfinite)
    assert parameter.grad.tolist() == pytest.approx([3.0, 4.0])


@pytest.mark.parametrize("nonfinite", ["keep", "zero"])
def test_policies_that_contradict_are_refused(nonfinite):
    with pytest.raises(ValueError, match="error_if_nonfinite"):
        clip_grad_norm_([], 1.0, error_if_nonfinite=True, nonfinite=nonfinite)


def test_a_policy_that_is_none_is_refused():
    with pytest.raises(ValueError, match="ignore"):
        clip_grad_norm_([], 1.0, nonfinite="ignore")


def test_nothing_to_clip():
    assert clip_grad_norm_([], 1.0).item() == 0
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0


@pytest.mark.parametrize("nonfinite", ["keep", "zero"])
def test_no_host_sync(nonfinite):
    parameters = parameters_with(random(4), random(5, dtype=torch.bfloat16), random(3, dtype=torch.complex64))
    with HostSyncs() as syncs:
        clip_grad_norm_(parameters, 0.1, nonfinite=nonfinite)
    assert syncs == []
    with HostSyncs() as syncs:
        clip_grad_norm_(parameters, 0.01, nonfinite="raise")
    assert len(syncs) == 1


def test_deferred_clipping_is_the_same_number():
    grads = [random(10), random(7, seed=1)]
    coefficient = clip_coefficient(total_norm(grads), 0.5)
    by_hand = [grad * coefficient for grad in grads]
    clip_grad_norm_(parameters_with(*grads), 0.5)
    assert all(torch.equal(grad, expected) for grad, expected in zip(grads, by_hand, strict=True))


def test_neighbours_in_a_buffer_cost_what_one_tensor_costs():
    def operations(count):
        parameters = parameters_with(*random(6000).view(count, -1).unbind())
        with Operations() as counted:
            clip_grad_norm_(parameters, 0.1)
        counted.pop("aten.new_empty", None)
        return counted

    assert operations(100) == operations(1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_multiplying_rounds_once(dtype):
    grad, factor = random(1000).to(dtype), torch.tensor(1 / 3)
    expected = (grad.double() * factor.double()).to(dtype)
    multiply_([grad], factor)
    assert torch.equal(grad.float(), expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("factor", [1 / 3, 3e-7])
def test_a_number_is_not_rounded_to_the_dtype_of_the_gradients(dtype, factor):
    grad = (random(1000) * 100).to(dtype)
    expected = (grad.double() * factor).to(dtype)
    multiply_([grad], factor)
    torch.testing.assert_close(grad.float(), expected.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("number", [complex(-0.0, -1), complex(1, -0.0), complex(math.inf, 1), complex(1, math.nan)])
def test_a_complex_gradient_keeps_its_bits_if_its_norm_does_not_call_for_clipping(dtype, number):
    grad = torch.tensor([number], dtype=dtype)
    before = grad.view(torch.uint8).tolist()
    clip_grad_norm_(parameters_with(grad), 5.0)
    assert grad.view(torch.uint8).tolist() == before


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [2e200, 3e-200, 7.0])
def test_fp64_gradients_are_clipped_with_all_their_digits(size, norm_type):
    values = [
        torch.tensor([1.0, -2.0, 0.1], dtype=torch.float64) * size,
        torch.full((2,), 3 * size, dtype=torch.float64),
    ]
    ours, reference = parameters_with(*(v.clone() for v in values)), parameters_with(*(v.clone() for v in values))
    expected = torch.linalg.vector_norm(torch.cat(values) / size, norm_type) * size
    norm = clip_grad_norm_(ours, 1e-250, norm_type)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
    for ours_, reference_ in zip(ours, reference, strict=True):
        torch.testing.assert_close(ours_.grad, reference_.grad * (1e-250 / (expected + 1e-6)), rtol=1e-13, atol=0)


def test_an_fp64_gradient_among_others_is_clipped_with_its_digits():
    narrow, wide = torch.tensor([3.0, 1.0]), torch.tensor([2e200], dtype=torch.float64)
    parameters = parameters_with(narrow, wide, narrow.bfloat16(), torch.complex(narrow, narrow))
    assert clip_grad_norm_(parameters, 1e195).item() == pytest.approx(2e200, rel=1e-14)
    assert wide.item() == pytest.approx(1e195, rel=1e-14)
    assert narrow.tolist() == pytest.approx([3 * 5e-6, 5e-6])


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_what_clips_nothing_by_mistake_is_told(clip):
    module = nn.Linear(2, 2)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip([], 1.0)
        clip([frozen], 1.0)
        clip(module.parameters(), 1.0)  # none has a gradient yet
    for given, words in [
        ([torch.ones(2), torch.ones(3)], "none of the 2 tensors given as parameters"),
        ((parameter for parameter in ()), "empty generator, no gradient clipping will occur"),
    ]:
        with pytest.warns(UserWarning, match=words) as told:
            clip(given, 1.0)
        assert told[0].filename == __file__
    for given, words in [
        (module, r"a Linear was given: pass its \.parameters\(\)"),
        (nn.ModuleList([module]), "a ModuleList was given"),
        (module.named_parameters(), r"(?s)not tuple.*named_parameters\(\) gives"),
        (dict(module.named_parameters()), r"not str.*named_parameters\(\) gives"),
    ]:
        with pytest.raises(TypeError, match=words):
            clip(given, 1.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_error_has_the_words_of_torch(norm_type):
    words = (
        f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped"
    )
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        with pytest.raises(RuntimeError, match=re.escape(words)):
            clip(parameters_with(torch.tensor([1.0, math.nan])), 1.0, norm_type, error_if_nonfinite=True)


def lazily_negative():
    """As autograd leaves it where a complex number was conjugated."""
    parameter = nn.Parameter(torch.tensor(3.0))
    (torch.complex(torch.zeros(()), parameter).conj() * 2j).real.backward()
    assert parameter.grad.is_neg()
    return parameter


def test_a_lazily_negative_gradient_is_clipped_in_place():
    value = lazily_negative().grad.item()
    parameter = lazily_negative()
    assert clip_grad_norm_(parameter, 0.5).item() == abs(value)
    assert parameter.grad.item() == pytest.approx(math.copysign(0.5, value))
    parameter, grad = lazily_negative(), lazily_negative().grad
    clip_grad_value_(parameter, 0.25)
    assert parameter.grad.item() == math.copysign(0.25, value)
    multiply_([grad, grad.view(1)], torch.tensor(0.5))
    assert grad.item() == value / 2
    parameter = lazily_negative()
    with torch.no_grad():
        parameter.grad.fill_(math.inf)
    clip_grad_norm_(parameter, 1.0, nonfinite="zero")
    assert parameter.grad.item() == 0


def test_memory_that_holds_the_conjugate_is_multiplied():
    number = torch.tensor([3 + 4j])
    multiply_([number.conj()], torch.tensor(2.0))
    assert number.item() == 6 + 8j


def test_multiplying_any_mix():
    base, dense = torch.ones(3, 1), torch.full((2, 2), 3.0)
    sparse = torch.sparse_coo_tensor([[0, 0, 1]], torch.tensor([1.0, 2.0, 3.0]), (3,), check_invariants=True)
    number = torch.complex(torch.tensor([1.0]), torch.tensor([2.0]))
    multiply_([base.expand(3, 4), Part([dense, dense]), None, sparse, number, torch.empty(0)], 2.0)
    assert base.flatten().tolist() == [2, 2, 2]
    assert dense.flatten().tolist() == [6] * 4
    assert sparse.to_dense().tolist() == [6, 6, 0]
    assert number.item() == 2 + 4j


def test_a_factor_of_several_numbers_is_refused():
    with pytest.raises(ValueError, match="one element"):
        multiply_([torch.ones(2)], torch.ones(2))


def test_multiplying_a_parameter_is_refused():
    with pytest.raises(TypeError, match="grads_of"):
        multiply_(parameters_with(random(2)), 0.5)
