"""GLM-5.2 and DeepSeek-V3.2: sparse latent attention, a mixture of experts, and a layer that drafts tokens."""
