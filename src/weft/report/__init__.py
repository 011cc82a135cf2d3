"""Results as terminal output, HTML pages, Perfetto traces and charts. Never imports torch."""
