"""The guide's example is a test that passes."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "testing-a-processor.md"


def test_the_example_passes() -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.M)
    names: dict[str, object] = {}
    exec(snippet, names)
    test = names["test_carts"]
    assert callable(test)
    test()
