"""Invalid bodies at the root are refused as a list of problems, never as a defect."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gristmill_api.atropos.messages import ScoredData


@pytest.mark.parametrize("messages", [5, True, 1.5, "text", {"role": "user"}, [5], [["text"]], [[{"role": "user"}]]])
def test_messages_of_another_type_are_a_validation_error(messages: Any) -> None:
    with pytest.raises(ValidationError, match="messages"):
        ScoredData.model_validate({"tokens": [[1]], "masks": [[1]], "scores": [0.0], "messages": messages})
