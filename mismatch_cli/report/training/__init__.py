"""What `train` shows: reward, mismatch and blocked tokens over the steps, of one run or of several."""
