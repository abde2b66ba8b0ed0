"""What the API server serves under ``/saga``: the tab, and the API that the tab and programs call."""
