"""kvlab: what happens when requests to a multimodal model share the KV pages of a common prefix?"""
