"""What steps need of the requests in the rows of the page table, in arrays by row, so that a step has no loop over its rows."""

import numpy as np
from request import Request

__all__ = ["Rows"]

UNLIMITED = 2**31 - 1


class Rows:
    """The request of each row, and arrays by row. Those of a row without a request are not read."""

    def __init__(self, num_rows: int) -> None:
        """Make rows without requests."""
        self.requests: list[Request | None] = [None] * num_rows
        self.is_sampled, self.is_streamed = np.zeros((2, num_rows), bool)
        self.limits = np.full(num_rows, UNLIMITED, np.int32)  # tokens of a prompt and its answer
        self.stop_token_ids = np.full((num_rows, 1), -1, np.int32)
        self.top_k, self.seed = np.zeros((2, num_rows), np.int32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.num_in_flight = np.zeros(num_rows, np.int32)  # steps whose results are not known
        # Rejected drafts of ended steps, since the last step that began with a known token.
        self.num_rejected = np.zeros(num_rows, np.int32)

    def put(self, request: Request) -> None:
        """Put a request into its row, or note that it samples now."""
        row, params, is_sampled = request.row, request.params, request.is_sampled
        self.requests[row], self.is_sampled[row], self.is_streamed[row] = request, is_sampled, request.streams
        self.limits[row] = request.num_prompt_tokens + params.max_tokens if is_sampled else UNLIMITED
        self.stop_token_ids[row] = -1 if params.stop_token_id is None or not is_sampled else params.stop_token_id
        self.temperature[row], self.top_k[row], self.seed[row] = params.temperature, params.top_k, params.seed
