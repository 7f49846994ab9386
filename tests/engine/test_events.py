"""Cutting and counting answers, and what a result says of itself."""

from redraft.engine.events import Result, count_tokens, cut


def test_an_answer_is_cut_at_its_first_end_token_or_its_room() -> None:
    ends = (1, 4)
    assert cut([7, 8, 4, 9, 0, 0, 0, 0], ends, 5) == ([7, 8, 4], "stop")
    assert cut([7, 8, 9, 9, 4, 0], ends, 5) == ([7, 8, 9, 9, 4], "stop")
    assert cut([7, 8, 9, 9, 9, 4, 0, 0], ends, 5) == ([7, 8, 9, 9, 9], "length")
    assert cut([7, 8], ends, 5) == ([7, 8], None)
    assert cut([7, 8], (), 2) == ([7, 8], "length")


def test_a_result_stores_its_tokens_and_derives_the_ratios() -> None:
    answer = [5, 0, 6, 1]
    result = Result(answer, count_tokens(answer, 0), 7, [4, 2], 0.5, "stop", 3, 0)
    assert (result.tokens, result.forwards, result.canvases) == (3, 6, 2)
    assert (result.tokens_per_forward, result.tokens_per_second) == (0.5, 6.0)
    told = result.to_dict()
    assert told["tokens"] == 3 and told["tokens_per_forward"] == 0.5 and told["steps_per_canvas"] == [4, 2]
