"""The aligned append store (FlowKV §4.1): rows of whole windows, read gradually when they close, dropped whole."""
