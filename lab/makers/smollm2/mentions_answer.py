"""The reward of the recorded training run: 1 if the response mentions the answer, else 0."""


def mentions_answer(response: str, answer: str) -> float:
    return float(answer.lower() in response.lower())
