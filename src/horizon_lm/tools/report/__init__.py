"""Write the files of a run as one HTML page. Nothing here imports torch, so that the command takes only a second."""
