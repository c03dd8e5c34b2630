"""Files of weights: read into host memory, decoded, merged and written."""
