import stepstack_deepspeed


def test_importing_needs_no_engine():
    assert stepstack_deepspeed.__doc__
