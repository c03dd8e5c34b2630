"""Host memory as autograd, PEFT and other code see it: parameters, their gradients, and updates."""
