import stepstack_megatron


def test_importing_needs_no_engine():
    assert stepstack_megatron.__doc__
