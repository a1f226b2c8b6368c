"""From an FX graph to AttentionSpecs and back: find, region, lift, replace, verify."""
