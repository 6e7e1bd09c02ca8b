import stepstack_nemo


def test_importing_needs_no_engine():
    assert stepstack_nemo.__doc__
