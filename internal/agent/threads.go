package agent

import (
	"runtime"
	"sync"
)

// ReserveThreads makes sure that the process has n threads beyond those that
// it uses now, which the runtime then keeps and takes before it makes new ones.
// A sandbox whose processes have reached its limit lets no thread be made, and
// a Go program that needs one then dies: as process 1, with all that runs.
func ReserveThreads(n int) {
	var made sync.WaitGroup
	made.Add(n)
	release := make(chan struct{})
	for range n {
		go func() {
			runtime.LockOSThread() // so none of them shares a thread
			defer runtime.UnlockOSThread()
			made.Done()
			<-release
		}()
	}
	made.Wait()
	close(release)
}
