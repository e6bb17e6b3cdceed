from __future__ import annotations

from tests.lint.check_isa_objects import weak_functions


def test_weak_functions_are_found_and_others_are_not() -> None:
    output = (
        "0000000000000000 T xllm::dot_q8_0_avx2(float*, int)\n"
        "0000000000000000 W float const& std::min<float>(float const&, float const&)\n"
        "0000000000000040 t xllm::(anonymous namespace)::sum(float*)\n"
    )
    assert weak_functions(output) == ["float const& std::min<float>(float const&, float const&)"]
