"""From an AttentionSpec to source to a callable: plan, emit, launch."""
