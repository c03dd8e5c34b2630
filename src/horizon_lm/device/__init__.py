"""The one seam to hardware."""
