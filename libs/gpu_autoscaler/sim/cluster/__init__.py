"""The simulated cluster: objects, controllers, scheduler, volumes, cloud."""
