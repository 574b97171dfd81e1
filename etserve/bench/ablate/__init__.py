"""`etserve ablate`: what each scale of the control loop gains and costs on this model and machine."""
