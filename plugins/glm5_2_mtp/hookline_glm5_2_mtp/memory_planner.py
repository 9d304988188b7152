"""What a step of this model needs beside weights and cache."""

from __future__ import annotations

from hookline.memory_planner import MemoryPlanner
from hookline_glm5_2_mtp.config import GlmMoeDsaConfig


class GlmMemoryPlanner(MemoryPlanner):
    """Counts latent attention and the indexer in place of grouped-query attention.

    Weights and cache need no counting of their own: the draft's layer is among the containers, its two cache groups are
    among the model's, and both count in full.
    """

    config: GlmMoeDsaConfig

    def activation_bytes(self, itemsize: int) -> int:
        c, options = self.config, self.engine_config
        # Of each token, one layer at a time: the stream, what the latents and queries are projected to, and the heads
        # as they meet the cache and as they leave it. The unabsorbed form is taken where it holds no more.
        attention = 3 * c.hidden_size + 2 * (c.q_lora_rank + c.latent_width)
        attention += c.num_heads * (2 * c.head_dim + 2 * c.latent_width + 2 * c.v_head_dim)
        attention += 2 * (c.index_n_heads + 1) * c.index_head_dim
        feed_forward = 3 * c.hidden_size + 3 * c.intermediate_size
        experts = c.n_top_k * (4 * c.hidden_size + 3 * c.expert_intermediate_size)
        width = max(attention, feed_forward, 3 * c.hidden_size + experts + 3 * c.shared_intermediate_size)
        lists = 2 * 4 * c.index_topk
        tokens = options.max_batch_tokens * (width * itemsize + lists)
        # Of each request a row, and one more for each draft that it verifies.
        drafts = 0 if options.speculative is None else options.speculative.num_speculative_tokens
        rows = min(options.max_running * (1 + drafts), options.max_batch_tokens)
        return tokens + rows * c.vocab_size * (itemsize + 4)
